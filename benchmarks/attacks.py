#!/usr/bin/env python3
"""What an honest team loses beside a team that games the scheduler: eleven attacks, simulated on the shipped profile.

    python -m benchmarks.attacks [--attack NAME ...] [--honest streams|queue ...] [--slots 64 ...]
        [--kv-memory 2GiB ...] [--seconds 60] [--set isolation=strict ...] [--jobs 2] [--check] [--json r.json]

The honest team sends *streams* (8 answers of 3,000 tokens at once) or a *queue* (600 short requests at once); the
attacker has the same weight. Loss is what the honest team gets beside a second honest team, divided by what it gets
beside the attacker, in the seconds from 5 on: in device time charged, in output tokens, in prompt and output tokens,
and in tokens weighed by their time in a batch (`work`), which is judged beside device time: whether the window catches
more of a queue's prompts or of its answers shifts the plain counts and loses nothing. 1 is no loss. Without options
every attack is tried in every setting: 88 cells, about four minutes of CPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.sim.clients import SECOND_US, Ask, Client, Contest, at_once, every
from engine.sim.parts import fixed_profile
from gateway.command import print_table
from gateway.settings.values import parse_text, setting
from policies.tiers import DEFAULT_TIERS, Tier

HONEST = "honest"
BEGIN_S = 5  # the first seconds are everybody's prompts
SECONDS = 60
SLOTS = (16, 64)
KV_MEMORY = ("2GiB", "360MiB")
DEVICE_LIMIT = 1.05
TOKENS_LIMIT = {"streams": 1.15, "queue": 1.25}

_TIERS = {tier.name: tier for tier in DEFAULT_TIERS}
_SILVER = _TIERS["silver"]


def _streams(team: str) -> list[Client]:
    return [at_once(team, 8, Ask(200, 3000))]


def _queue(team: str) -> list[Client]:
    return [at_once(team, 600, Ask(200, 100))]


HONEST_WAYS: dict[str, Callable[[str], list[Client]]] = {"streams": _streams, "queue": _queue}


@dataclass(frozen=True, slots=True)
class Attack:
    """How the attacker sends its work: its clients, by team; all its teams have `tier` with the honest weight."""

    clients: Callable[[str], list[Client]]
    teams: tuple[str, ...] = ("attacker",)
    tier: Tier = _SILVER
    is_promised: bool = True  # the default isolation (`batch`) keeps the loss within the limits


ATTACKS: dict[str, Attack] = {
    "split": Attack(lambda team: [at_once(team, 4000, Ask(20, 10))]),
    "four-teams": Attack(_streams, teams=("a", "b", "c", "d"), is_promised=False),
    "abandons": Attack(lambda team: [every(team, SECOND_US // 10, Ask(6000, 100, leave_after_us=2 * SECOND_US))]),
    "long-prompts": Attack(lambda team: [at_once(team, 60, Ask(4000, 1))]),
    "few-long": Attack(lambda team: [every(team, 4 * SECOND_US, Ask(8000, 1))]),
    "full-contexts": Attack(lambda team: [at_once(team, 64, Ask(100, 8090))], is_promised=False),
    "promotion-storm": Attack(lambda team: [at_once(team, 1000, Ask(1500, 200))]),
    "from-bronze": Attack(
        lambda team: [at_once(team, 4096, Ask(10, 4))], tier=replace(_TIERS["bronze"], weight=_SILVER.weight)
    ),
    "bursts": Attack(lambda team: [every(team, 4 * SECOND_US, Ask(500, 50), num=64)]),
    "half-prompts": Attack(lambda team: [at_once(team, 12, Ask(8190, 1))]),
    "decode-flood": Attack(lambda team: [at_once(team, 200, Ask(10, 4000))], is_promised=False),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where an attack is tried. `config` is compared by value, so that cells share their baselines."""

    honest: str
    config: EngineConfig
    seconds: int = SECONDS


@dataclass(frozen=True, slots=True)
class Got:
    """What the honest team got in the window, and what all its rivals got together."""

    device_us: int
    output_tokens: int
    tokens: int  # prompt and output

    rivals_us: int

    @property
    def work_us(self) -> float:
        """Its tokens, each by its marginal time without context."""
        profile, num_prompt = fixed_profile(), self.tokens - self.output_tokens
        return num_prompt * profile.prefill_token_us + self.output_tokens * profile.decode_row_us


@dataclass(frozen=True, slots=True)
class Loss:
    """One cell of the table."""

    attack: str
    setting: Setting
    beside_honest: Got
    beside_attacker: Got

    @property
    def device(self) -> float:
        return self.beside_honest.device_us / max(1, self.beside_attacker.device_us)

    @property
    def output_tokens(self) -> float:
        return self.beside_honest.output_tokens / max(1, self.beside_attacker.output_tokens)

    @property
    def tokens(self) -> float:
        return self.beside_honest.tokens / max(1, self.beside_attacker.tokens)

    @property
    def work(self) -> float:
        """In tokens, each weighed by the time that it takes in a batch."""
        return self.beside_honest.work_us / max(1.0, self.beside_attacker.work_us)

    @property
    def is_within(self) -> bool:
        """Whether device time and weighed tokens are within the limits."""
        return self.device <= DEVICE_LIMIT and self.work <= TOKENS_LIMIT[self.setting.honest]


def play(attack: str | None, setting: Setting) -> Got:
    """The honest team beside one attack, or beside a second honest team (None)."""
    honest = HONEST_WAYS[setting.honest]
    how = ATTACKS[attack] if attack is not None else Attack(honest)
    teams = {HONEST: _SILVER} | dict.fromkeys(how.teams, how.tier)
    clients = [*honest(HONEST), *(client for team in how.teams for client in how.clients(team))]
    contest = Contest(teams, clients, profile=fixed_profile(), config=setting.config)
    tallies = contest.run((BEGIN_S + setting.seconds) * SECOND_US, from_us=BEGIN_S * SECOND_US)
    mine = tallies.pop(HONEST)
    return Got(mine.device_us, mine.output_tokens, mine.tokens, sum(tally.device_us for tally in tallies.values()))


def measure(attacks: Iterable[str], settings: Iterable[Setting], jobs: int = 1) -> list[Loss]:
    """Every attack in every setting, attacks of one setting together; with `jobs` processes when more than 1."""
    names, places = list(attacks), list(settings)
    runs = [(name, place) for place in places for name in (None, *names)]
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            got = list(pool.map(play, *zip(*runs, strict=True)))
    else:
        got = [play(name, place) for name, place in runs]
    found = {(name, place): result for (name, place), result in zip(runs, got, strict=True)}
    return [Loss(name, place, found[None, place], found[name, place]) for place in places for name in names]


def setting_for(honest: str, slots: int, kv_memory: str, seconds: int = SECONDS, **changed: object) -> Setting:
    """One setting of the table. `changed` are fields of EngineConfig. Raises SettingsError for a size that is none."""
    kv_memory_bytes = parse_text(setting("kv_memory"), kv_memory, "--kv-memory")
    plain = EngineConfig(kind="sim", max_batch_size=slots, kv_memory_bytes=kv_memory_bytes)
    return Setting(honest, msgspec.structs.replace(plain, **changed), seconds)


def parse_changed(pairs: Sequence[str]) -> dict[str, object]:
    """`NAME=VALUE` of EngineConfig's fields as typed values. Raises SystemExit for a name or value that is none."""
    texts = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = sorted(set(texts) - set(EngineConfig.__struct_fields__))
    if unknown:
        raise SystemExit(f"--set: the engine has no setting {unknown[0]!r}")
    try:
        config = msgspec.convert(texts, EngineConfig, strict=False)
    except msgspec.ValidationError as error:
        raise SystemExit(f"--set: {error}") from error
    return {name: getattr(config, name) for name in texts}


def row(loss: Loss) -> dict[str, Any]:
    """One line of the table."""
    got, config = loss.beside_attacker, loss.setting.config
    return {
        "attack": loss.attack,
        "honest": loss.setting.honest,
        "slots": config.max_batch_size,
        "kv_mib": config.kv_memory_bytes // 2**20,
        "device": round(loss.device, 2),
        "output": round(loss.output_tokens, 2),
        "tokens": round(loss.tokens, 2),
        "work": round(loss.work, 2),
        "honest_s": round(got.device_us / SECOND_US, 1),
        "attacker_s": round(got.rivals_us / SECOND_US, 1),
        "verdict": "ok" if loss.is_within else "over" if ATTACKS[loss.attack].is_promised else "not promised",
    }


def main() -> int:
    """0; with --check 1 when an attack that the isolation promises to hold costs more than the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="once for each; all")
    parser.add_argument("--honest", action="append", choices=HONEST_WAYS, help="once for each; both")
    parser.add_argument("--slots", action="append", type=int, help="once for each; 16 and 64")
    parser.add_argument("--kv-memory", action="append", metavar="SIZE", help="once for each; 2GiB and 360MiB")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"the window, from second {BEGIN_S} on")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of EngineConfig")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--check", action="store_true", help="exit 1 when a promised limit is passed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON, too")
    arguments = parser.parse_args()
    changed = parse_changed(arguments.set)
    settings = [
        setting_for(honest, slots, kv_memory, arguments.seconds, **changed)
        for honest in arguments.honest or HONEST_WAYS
        for slots in arguments.slots or SLOTS
        for kv_memory in arguments.kv_memory or KV_MEMORY
    ]
    rows = [row(loss) for loss in measure(arguments.attack or ATTACKS, settings, arguments.jobs)]
    print_table(rows, list(rows[0]), title="loss of the honest team: beside a second honest team / beside the attacker")
    if arguments.json:
        given = {name: str(value) for name, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps({"arguments": given, "rows": rows}, indent=1) + "\n")
    return int(arguments.check and any(found["verdict"] == "over" for found in rows))


if __name__ == "__main__":
    sys.exit(main())
