#!/usr/bin/env python3
"""What a chat team waits for beside long prompts and long answers: three loads, simulated on the shipped profile.

    python -m benchmarks.long_prompts [--load T1 ...] [--policy eg-mlfq ...] [--set NAME=VALUE ...] [--json r.json]

T1: 8 chat answers of 400 tokens (200 in) at once; 24 prompts of 4,000 tokens from another team 3 s later.
T2: chat asks a short question every 2 s for two minutes; other teams send 8 prompts of 8,190 tokens each at the start.
T3: one team sends 16 answers of 2,000 tokens, and from second 10 on ten short questions a second, on 16 slots.
All teams are silver. `alone` leaves the other teams out. Times are seconds of the chat requests, which in T3 are the
short ones; `longest gap` is between two tokens of any request of chat's team, and `share` the part of the device's time
that the team was charged. `longest pause` is that of any request of any team, `pause bound` the largest that was
promised. With `--engine torch` a load is played in real time on the real engine, and simulated beside it with the step
profile that the engine measured at its start (minutes for each load; give it a core of its own).
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.attacks import parse_changed
from engine.config import EngineConfig
from engine.parts import EngineParts
from engine.process.assembly import build_parts, read_config
from engine.sim.clients import SECOND_US, Ask, Client, Contest, Record, Tally, at_once, every, percentile
from engine.sim.parts import fixed_profile
from engine.wire.messages import Finished
from gateway.command import print_table
from policies.cost import StepProfile
from policies.tiers import DEFAULT_TIERS

CHAT, DOCS = "chat", "docs"
MIB = 2**20
SILVER = next(tier for tier in DEFAULT_TIERS if tier.name == "silver")
SHORT_TOKENS = 100  # in T3 what answers more is not chat
T2_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Load:
    """Clients, the engine's settings, and what of it is said to be chat."""

    name: str
    clients: tuple[Client, ...]
    changed: dict[str, object]
    until_ended: str | None = CHAT

    def config(self, **changed: object) -> EngineConfig:
        """The engine's settings, with `changed` fields on top."""
        return msgspec.structs.replace(EngineConfig(kind="sim"), **{**self.changed, **changed})


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a load."""

    chat: tuple[Record, ...]
    tallies: dict[str, Tally]
    end_us: int
    longest_step_us: int

    def ttfts_us(self) -> list[int]:
        """Of chat, ascending."""
        return sorted(ttft for record in self.chat if (ttft := record.ttft_us) is not None)

    @property
    def longest_pause_us(self) -> int:
        """Of any ended request of any team: the longest it went without a step."""
        return max((ended.longest_pause_us for ended in self._ended()), default=0)

    @property
    def pause_bound_us(self) -> int:
        """The largest maximum pause that was promised to one of them when it began to starve; 0 if none did."""
        return max((ended.pause_bound_us for ended in self._ended()), default=0)

    def _ended(self) -> list[Finished]:
        return [r.finished for tally in self.tallies.values() for r in tally.records if r.finished is not None]

    def jcts_us(self) -> list[int]:
        """Of chat, ascending."""
        return sorted(jct for record in self.chat if (jct := record.jct_us) is not None)


def t1(*, with_docs: bool = True) -> Load:
    """Eight chat streams, and 24 long prompts of another team."""
    chat = at_once(CHAT, 8, Ask(200, 400))
    docs = at_once(DOCS, 24, Ask(4000, 1), at_us=3 * SECOND_US)
    return Load("T1" if with_docs else "T1 alone", (chat, docs) if with_docs else (chat,), {})


def t2(prompt_tokens: int = 100, num_docs_teams: int = 1, kv_memory_bytes: int | None = None) -> Load:
    """A short question every 2 s beside teams of 8 prompts that fill the context; without memory the default's."""
    questions = Ask(prompt_tokens, 20)
    chat = every(CHAT, 2 * SECOND_US, questions, from_us=SECOND_US, to_us=T2_SECONDS * SECOND_US)
    docs = (at_once(f"{DOCS}{number}", 8, Ask(8190, 1)) for number in range(num_docs_teams))
    memory: dict[str, object] = {} if kv_memory_bytes is None else {"kv_memory_bytes": kv_memory_bytes}
    told = "" if kv_memory_bytes is None else f", {kv_memory_bytes // MIB} MiB"
    teams = {0: " alone", 1: ""}.get(num_docs_teams, f", {num_docs_teams} docs teams")
    return Load(f"T2, {prompt_tokens} in{teams}{told}", (chat, *docs), memory)


def t3(*, coast: bool = True) -> Load:
    """Long answers and short questions of one team."""
    long = at_once(CHAT, 16, Ask(50, 2000))
    short = every(CHAT, SECOND_US // 10, Ask(10, 4), from_us=10 * SECOND_US, to_us=70 * SECOND_US)
    return Load("T3" if coast else "T3, no coast", (long, short), {"max_batch_size": 16, "coast": coast})


def loads() -> list[Load]:
    """What the command plays."""
    tight = 1440 * MIB
    return [
        t1(with_docs=False),
        t1(),
        t2(num_docs_teams=0),
        t2(),
        t2(kv_memory_bytes=tight),
        t2(300),
        t2(300, kv_memory_bytes=tight),
        t2(1000),
        t2(1000, kv_memory_bytes=tight),
        t2(100, 5),
        t2(100, 5, tight),
        t2(300, 5),
        t2(300, 5, tight),
        t3(),
        t3(coast=False),
    ]


def play(load: Load, parts: EngineParts | None = None, profile: StepProfile | None = None, **changed: object) -> Played:
    """Until chat has all its answers. `changed` are fields of EngineConfig; `parts` those of a real engine."""
    teams = dict.fromkeys((client.team for client in load.clients), SILVER)
    config = load.config(**changed)
    contest = Contest(teams, load.clients, profile=profile or fixed_profile(), config=config, parts=parts)
    tallies = contest.run(until_ended=load.until_ended)
    records = tallies[CHAT].records
    is_mixed = any(record.ask.output_tokens > 400 for record in records)
    chat = tuple(r for r in records if not is_mixed or r.ask.output_tokens <= SHORT_TOKENS)
    return Played(chat, tallies, contest.clock.now_us(), contest.longest_step_us)


def rows_of(load: Load, policy: str, engine: str, **changed: object) -> list[dict[str, Any]]:
    """The lines of one load: of the simulator, or of the real engine and of the simulator with its profile."""
    if engine == "sim":
        return [row(load, policy, play(load, policy=policy, **changed))]
    config = read_config(msgspec.json.encode(load.config(policy=policy, **changed, kind=engine)).decode())
    parts = build_parts(config)
    real = play(load, parts, policy=policy, **changed)
    simulated = play(load, profile=parts.profile, policy=policy, **changed)
    return [{"engine": name, **row(load, policy, played)} for name, played in (("torch", real), ("sim", simulated))]


def row(load: Load, policy: str, played: Played) -> dict[str, Any]:
    """One line of the table."""
    ttfts_us, jcts_us = played.ttfts_us(), played.jcts_us()
    charged_us = sum(tally.device_us for tally in played.tallies.values())

    def seconds(us: float) -> float:
        return round(us / SECOND_US, 2)

    return {
        "load": load.name,
        "policy": policy,
        "requests": len(played.chat),
        "ttft_p50": seconds(percentile(ttfts_us, 50)),
        "ttft_p95": seconds(percentile(ttfts_us, 95)),
        "ttft_max": seconds(max(ttfts_us, default=0)),
        "jct_mean": seconds(sum(jcts_us) / max(1, len(jcts_us))),
        "jct_max": seconds(max(jcts_us, default=0)),
        "longest_gap": seconds(max(played.tallies[CHAT].gaps_us, default=0)),
        "longest_pause": seconds(played.longest_pause_us),
        "pause_bound": seconds(played.pause_bound_us),
        "longest_step": seconds(played.longest_step_us),
        "share": round(played.tallies[CHAT].device_us / max(1, charged_us), 3),
        "end": seconds(played.end_us),
    }


def main() -> int:
    """Always 0: it measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", choices=("T1", "T2", "T3"), help="once for each; all")
    parser.add_argument("--policy", action="append", help="once for each; eg-mlfq and fcfs")
    parser.add_argument("--only", metavar="NAME", help="of these the one with this name in the table")
    parser.add_argument("--engine", choices=("sim", "torch"), default="sim")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of EngineConfig")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON, too")
    arguments = parser.parse_args()
    changed = parse_changed(arguments.set)
    wanted = tuple(arguments.load or ("T1", "T2", "T3"))
    policies = arguments.policy or ["eg-mlfq", "fcfs"]
    chosen = [load for load in loads() if load.name.startswith(wanted) and (arguments.only in (None, load.name))]
    rows = [
        line for load in chosen for policy in policies for line in rows_of(load, policy, arguments.engine, **changed)
    ]
    print_table(rows, list(rows[0]), title="chat beside long prompts and long answers; seconds")
    if arguments.json:
        arguments.json.write_text(json.dumps({"set": arguments.set, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
