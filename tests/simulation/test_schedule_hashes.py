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
    ("demo", "swap", "eg-mlfq"): "ec2f804d9876bc68994693cc8e695fe5",
    ("demo", "swap", "fcfs"): "292cdf451e7be669429dcd7a93857632",
    ("demo", "reactive", "eg-mlfq"): "77675d7a78ccbc707da04465153df7a2",
    ("demo", "reactive", "fcfs"): "653c1375c3c1f74adbe2a2e4ca02b053",
    ("demo", "recompute", "eg-mlfq"): "5bf044eb20d094bdc31fd71459a2bb10",
    ("demo", "recompute", "fcfs"): "3990db7b5e3b7a3ce73c690fee97f25c",
    ("demo", "none", "eg-mlfq"): "52ddf8d1933842f97ea251acd08211b2",
    ("demo", "none", "fcfs"): "9de2ca2619599edc6bba1248826e7737",
    ("flood60", "ample", "eg-mlfq"): "32ab5ded390b69a267675bb924f950d8",
    ("flood60", "ample", "fcfs"): "92b61a40e869ccf87a2d5a62bd09df1a",
    ("flood60", "swap", "eg-mlfq"): "29ad7ce86c80286b0e6409ecf62853f0",
    ("flood60", "swap", "fcfs"): "870e5db15bd3e49537944c3e75238eb1",
    ("flood60", "reactive", "eg-mlfq"): "49197b427ef76525f962e663a7b37c78",
    ("flood60", "reactive", "fcfs"): "a2d849e21676819a69958b8ddb490d67",
    ("flood60", "recompute", "eg-mlfq"): "8e71516085fe01ccd71bfbad3e5a3238",
    ("flood60", "recompute", "fcfs"): "198245969ea0555db5292551a14414f8",
    ("flood60", "none", "eg-mlfq"): "32e1b27c644cab4bd7b9a93fc3430f55",
    ("flood60", "none", "fcfs"): "4114f7e65cba1a818d8484483a3563c5",
    ("mixed60", "ample", "eg-mlfq"): "daa65f09ca9cf633aad171eee55425c8",
    ("mixed60", "ample", "fcfs"): "507406c1737bf54d0617fe953ff939f8",
    ("mixed60", "swap", "eg-mlfq"): "c5d1969eaa0b12fd55d1668f81954662",
    ("mixed60", "swap", "fcfs"): "4f529c5182558f76a8a4edccda88c345",
    ("mixed60", "reactive", "eg-mlfq"): "3a31cd67eb752a10ef682a51171b2620",
    ("mixed60", "reactive", "fcfs"): "243083d9097b6aee967c3e1779d7d6ab",
    ("mixed60", "recompute", "eg-mlfq"): "cf500d3415f5a4e8ab6af11d7834dfe5",
    ("mixed60", "recompute", "fcfs"): "8b683f3c564bd9b61e695a1f566f7a9c",
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
