"""Doing something as a user who owns nothing: root may read and write everything, so tests that run as root change."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65_534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Have files opened as `nobody` when this process is root; else as who we are."""
    if os.geteuid() != 0:
        yield
        return
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
