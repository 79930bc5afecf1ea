"""Policies by name, as `--policy` and EngineConfig give it."""

from collections.abc import Callable

from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.fcfs import Fcfs
from policies.policy import Policy

POLICIES: dict[str, Callable[[PolicyConfig], Policy]] = {EgMlfq.name: EgMlfq, Fcfs.name: Fcfs}


def make_policy(name: str, config: PolicyConfig) -> Policy:
    """A fresh policy. Raises ValueError for an unknown name, naming those there are."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name](config)
