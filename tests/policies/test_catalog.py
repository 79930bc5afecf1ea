"""Policies by name."""

import pytest

from policies.catalog import POLICIES, make_policy
from policies.config import PolicyConfig


def test_names_agree_and_an_unknown_one_is_explained() -> None:
    assert {name: make_policy(name, PolicyConfig()).name for name in POLICIES} == {"eg-mlfq": "eg-mlfq", "fcfs": "fcfs"}
    with pytest.raises(ValueError, match=r"unknown policy 'edf'.*eg-mlfq, fcfs"):
        make_policy("edf", PolicyConfig())
