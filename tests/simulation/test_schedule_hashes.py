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
    ("demo", "ample", "eg-mlfq"): "2b881ef8d6b59412ee70bd20f2ff4e43",
    ("demo", "ample", "fcfs"): "3de51292879a0625e630daf77440bb53",
    ("demo", "swap", "eg-mlfq"): "f329cae9eb67a1aef47c0f92d4c6c472",
    ("demo", "swap", "fcfs"): "292cdf451e7be669429dcd7a93857632",
    ("demo", "reactive", "eg-mlfq"): "32c6fe054c530a35411706d5818eb337",
    ("demo", "reactive", "fcfs"): "653c1375c3c1f74adbe2a2e4ca02b053",
    ("demo", "recompute", "eg-mlfq"): "5d1c111457385f7bc8862631dac9fb5f",
    ("demo", "recompute", "fcfs"): "7d262c20b30ac36741d9ef33c5b13e82",
    ("demo", "none", "eg-mlfq"): "52ddf8d1933842f97ea251acd08211b2",
    ("demo", "none", "fcfs"): "9de2ca2619599edc6bba1248826e7737",
    ("flood60", "ample", "eg-mlfq"): "32ab5ded390b69a267675bb924f950d8",
    ("flood60", "ample", "fcfs"): "92b61a40e869ccf87a2d5a62bd09df1a",
    ("flood60", "swap", "eg-mlfq"): "1607533e54036dad8337e7a5770e2b7e",
    ("flood60", "swap", "fcfs"): "870e5db15bd3e49537944c3e75238eb1",
    ("flood60", "reactive", "eg-mlfq"): "1c98e45d0a34725ec4ec685e1ee2e1e1",
    ("flood60", "reactive", "fcfs"): "a2d849e21676819a69958b8ddb490d67",
    ("flood60", "recompute", "eg-mlfq"): "b8f5fb70dd6960ac42dc5872b52a5097",
    ("flood60", "recompute", "fcfs"): "df35a9d0ef2167062a1f18daaf119121",
    ("flood60", "none", "eg-mlfq"): "32e1b27c644cab4bd7b9a93fc3430f55",
    ("flood60", "none", "fcfs"): "4114f7e65cba1a818d8484483a3563c5",
    ("mixed60", "ample", "eg-mlfq"): "daa65f09ca9cf633aad171eee55425c8",
    ("mixed60", "ample", "fcfs"): "507406c1737bf54d0617fe953ff939f8",
    ("mixed60", "swap", "eg-mlfq"): "27d23372e2ed63342027954b6862cd4c",
    ("mixed60", "swap", "fcfs"): "d48a236fac25b4479b5c726576819a03",
    ("mixed60", "reactive", "eg-mlfq"): "0e1304e6a5d489f2e5b379f26783c515",
    ("mixed60", "reactive", "fcfs"): "243083d9097b6aee967c3e1779d7d6ab",
    ("mixed60", "recompute", "eg-mlfq"): "09c1fee5f1bc1e7474089a8d89761db3",
    ("mixed60", "recompute", "fcfs"): "307ea0f5b76f00ba8f7ad4c717f8ccfb",
    ("mixed60", "none", "eg-mlfq"): "f8d6e1195de32e3ca6db138794aea4fc",
    ("mixed60", "none", "fcfs"): "eb00746eac161ac961b44c593ca4a677",
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
