"""Pinned schedules: the same traces give the same schedules, commit after commit, until a commit says why they change.

A refactoring must not move one row or one copied block. Each pinned hash covers, step by step, who ran, from where and
how far, and whose blocks were copied. Print the present hashes with

    python -m tests.simulation.test_schedule_hashes
"""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.sim.parts import fixed_profile
from engine.sim.simulate import simulate
from engine.sim.workload import read_trace

ROOT = Path(__file__).resolve().parents[2]
TRACES = {
    "demo": ROOT / "gateway" / "demo" / "trace.jsonl",
    "flood60": ROOT / "benchmarks" / "traces" / "flood60.jsonl",
    "mixed60": ROOT / "benchmarks" / "traces" / "mixed60.jsonl",
}
TIERS = {"support": "gold", "chat": "gold", "reports": "bronze", "batch": "bronze"}
MIB = 2**20
# name -> EngineConfig fields. The host pool of "swap" is too small for all, so that KV is dropped there too.
MEMORY: dict[str, dict[str, Any]] = {
    "ample": {},
    "swap": {"kv_memory_bytes": 40 * MIB, "host_kv_memory_bytes": 40 * MIB},
    "reactive": {"kv_memory_bytes": 40 * MIB, "memory_preemption": "reactive"},
    "recompute": {"kv_memory_bytes": 40 * MIB, "memory_preemption": "recompute"},
    "none": {"kv_memory_bytes": 60 * MIB, "memory_preemption": "none"},
}
PINNED: dict[tuple[str, str, str], str] = {
    ("demo", "ample", "eg-mlfq"): "532eb129a601c21cde0f8d41c1e86a28",
    ("demo", "ample", "fcfs"): "4aab2a5a2afea35259263a38bb392f20",
    ("demo", "swap", "eg-mlfq"): "33b75ea375f2abf2fc4b0bbca2498602",
    ("demo", "swap", "fcfs"): "40e62a9a83d22b730aac72aed0944c7d",
    ("demo", "reactive", "eg-mlfq"): "cf886b86827f7084340b6fe351b5aa42",
    ("demo", "reactive", "fcfs"): "340ba9b292d07f67290133633b55e0b0",
    ("demo", "recompute", "eg-mlfq"): "c290469234dc2ec9f99112752be5318d",
    ("demo", "recompute", "fcfs"): "260dd13ffc82f1407c9f009c7c00c302",
    ("demo", "none", "eg-mlfq"): "db76193fcdf0bf8860591bac6e302057",
    ("demo", "none", "fcfs"): "c903f62b6cf01c7d211a9f2c60578f03",
    ("flood60", "ample", "eg-mlfq"): "82863f92228387c8ac8798d503008db6",
    ("flood60", "ample", "fcfs"): "56a27dd9a4518c94c4e72e7eb4829375",
    ("flood60", "swap", "eg-mlfq"): "bed3e2dc7fea73e9634fcaa520c78180",
    ("flood60", "swap", "fcfs"): "18e62c533d8f61c28e9f81519f20c288",
    ("flood60", "reactive", "eg-mlfq"): "8b8f52b7722d248fac7d3febf20dc25c",
    ("flood60", "reactive", "fcfs"): "5720e70828773e027f6fb72e72ee75ca",
    ("flood60", "recompute", "eg-mlfq"): "19e1d1ba2aeafd6f705d323d5a70a410",
    ("flood60", "recompute", "fcfs"): "9bb3b411bc758759162aa4898112ccbb",
    ("flood60", "none", "eg-mlfq"): "97cc9e9c371dd894c7ef0dcdfa667a2f",
    ("flood60", "none", "fcfs"): "9d625a75c9c08e328a5c9494abe7ecbe",
    ("mixed60", "ample", "eg-mlfq"): "2e833484743dde686ec5f590635d46d2",
    ("mixed60", "ample", "fcfs"): "c27411e6103ca303f6fcabe01737e9c6",
    ("mixed60", "swap", "eg-mlfq"): "8ccf32c427db27e2ec822a69f3f73b28",
    ("mixed60", "swap", "fcfs"): "aa17566c67f6564eefca87da53bd98f7",
    ("mixed60", "reactive", "eg-mlfq"): "265353fdc097fbb63978b4968976b602",
    ("mixed60", "reactive", "fcfs"): "c8ba6599945744c9f33c1bc2bcc55b62",
    ("mixed60", "recompute", "eg-mlfq"): "a0a3d6025ac130af5a416bbb0ab82973",
    ("mixed60", "recompute", "fcfs"): "070cdda2620915a897cfaf47956b7add",
    ("mixed60", "none", "eg-mlfq"): "efb6ea422e78b456861700fb1ca127ea",
    ("mixed60", "none", "fcfs"): "9f92ed234569d9395c298fad1e3cdfae",
}


@functools.cache
def hashes(trace_name: str, memory: str) -> dict[str, str]:
    """The schedule hash of each policy."""
    trace = read_trace(TRACES[trace_name])
    teams = {request.team for request in trace}
    report = simulate(
        trace,
        ["eg-mlfq", "fcfs"],
        profile=fixed_profile(),
        config=EngineConfig(kind="sim", max_batch_size=16, **MEMORY[memory]),
        team_tiers={team: tier for team, tier in TIERS.items() if team in teams},
    )
    return {policy["policy"]: policy["schedule_hash"] for policy in report["policies"]}


@pytest.mark.parametrize(("trace_name", "memory", "policy"), sorted(PINNED))
def test_when_nothing_is_meant_to_change_schedules_stay(trace_name: str, memory: str, policy: str) -> None:
    assert hashes(trace_name, memory)[policy] == PINNED[trace_name, memory, policy]


def _print() -> None:
    for trace_name in TRACES:
        for memory in MEMORY:
            for policy, digest in hashes(trace_name, memory).items():
                sys.stdout.write(f'    ("{trace_name}", "{memory}", "{policy}"): "{digest}",\n')


if __name__ == "__main__":
    _print()
