"""Every declared team counter, from where it is counted to where users see it. A new counter is tested by being listed.

The second test plants a counter in a process of its own: one line in the list and two columns are all that it needs.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from engine.process.samples import INTERVAL_US, ServiceSampler
from engine.wire.framing import FrameDecoder, encode
from engine.wire.messages import FromEngine, ServiceSamples
from gateway.metrics.requests import Meters
from gateway.metrics.shares import ServiceMeters
from gateway.metrics.teams import team_counters, team_gauges
from gateway.openai.booking import sample_rows
from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.sequences import TeamService, TeamTerms
from policies.team_counters import POLICY_COUNTERS, POLICY_TOTALS, TEAM_COUNTERS, Over, TeamCounter, values
from tenants import reports, tables
from tenants.ledger import Ledger
from tenants.reports.periods import Period
from tenants.reports.samples import HOUR_US
from tenants.retention import Retention
from tests.support.gateway.harness import Holder
from tests.support.tenants.histories import settle_retention
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]
START_US = NOW_US // HOUR_US * HOUR_US
ENGINE_COUNTERS = TEAM_COUNTERS[len(POLICY_COUNTERS) :]
NUMBERS = {counter.name: 1000 * number for number, counter in enumerate(TEAM_COUNTERS, start=1)}


class Counting(EgMlfq):
    """Its totals are counted in the team's account; what is no total is as told."""

    def __init__(self, team_id: int) -> None:
        super().__init__(PolicyConfig())
        self.configure([TeamTerms(team_id)], 0)
        self.account = self._meter.account(team_id)
        self.account.was_active = True
        self.others: dict[str, int] = {}

    def count(self, times: int) -> None:
        for name in POLICY_TOTALS:
            self.account.totals[name] += NUMBERS[name] * times
        for counter in POLICY_COUNTERS:
            if counter.over is not Over.SUM:
                self.others[counter.name] = NUMBERS[counter.name] * times

    def team_service(self) -> list[TeamService]:
        return [replace(service, **self.others) for service in super().team_service()]


def take(sampler: ServiceSampler, policy: Counting, times: int) -> ServiceSamples:
    """One interval as the gateway reads it from the wire, in which each counter has `times` its number."""
    policy.count(times)
    taken = sampler.take(sampler.due_in_us(0))
    assert taken is not None
    (team,) = taken.teams
    wanted = {name: number * times for name, number in NUMBERS.items()}
    assert values(team, POLICY_COUNTERS) == {counter.name: wanted[counter.name] for counter in POLICY_COUNTERS}
    team = replace(team, **{counter.name: wanted[counter.name] for counter in ENGINE_COUNTERS})
    (read,) = FrameDecoder(FromEngine).feed(encode(msgspec.structs.replace(taken, teams=(team,))))
    assert isinstance(read, ServiceSamples) and values(read.teams[0]) == wanted
    return read


def together(counter: TeamCounter, *times: int) -> int:
    """What the figures of intervals with so many `times` the counter's number make together."""
    combine = {Over.SUM: sum, Over.LEAST: min, Over.MOST: max}.get(counter.over, lambda figures: figures[-1])
    return NUMBERS[counter.name] * combine(times)


def as_shown(name: str, number: int) -> float:
    return number / 1e6 if name.endswith("_us") else number / 1e3 if name.endswith("_ms") else number


async def fairness_line(store: Store) -> dict[str, Any]:
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(START_US, START_US + 2 * HOUR_US))
    (line,) = json.loads(json.dumps(report))["data"]
    assert isinstance(line, dict)
    return line


async def test_each_listed_counter_arrives_where_it_is_shown(store: Store) -> None:
    team_id = await store.team("search")
    policy = Counting(team_id)
    sampler = ServiceSampler(policy, 0)
    intervals = [take(sampler, policy, times) for times in (1, 3, 2)]
    ledger = Ledger(store.database, store.directory / "journal", now_us=lambda: store.now_us)
    await ledger.start()
    for at_us, samples in zip((0, INTERVAL_US, HOUR_US), intervals, strict=True):
        ledger.add_samples(sample_rows(samples, START_US + at_us))
    await ledger.stop()
    async with store.database.session() as connection:
        query = select(tables.service_samples).order_by(tables.service_samples.c.at_us)
        rows = (await connection.execute(query)).mappings().all()
    for times, row in zip((1, 3, 2), rows, strict=True):
        assert {name: row[name] for name in NUMBERS} == {name: number * times for name, number in NUMBERS.items()}
    wanted = {
        counter.report: as_shown(counter.name, together(counter, 1, 3, 2))
        for counter in TEAM_COUNTERS
        if counter.report
    }
    line = await fairness_line(store)
    assert {name: line[name] for name in wanted} == wanted
    keeping = Retention(store.database, seconds_kept_hours=1, hours_kept_days=1)
    await settle_retention(keeping, START_US + 4 * HOUR_US)  # the seconds are gone, the hours are there
    async with store.database.session() as connection:
        assert (await connection.execute(select(tables.service_samples))).all() == []
        hours = (
            await connection.execute(select(tables.service_hours).order_by(tables.service_hours.c.at_us))
        ).mappings()
    kept = [counter for counter in TEAM_COUNTERS if counter.over is not Over.SECONDS]
    for times_of_hour, hour in zip(((1, 3), (2,)), hours, strict=True):
        assert {counter.name: hour[counter.name] for counter in kept} == {
            counter.name: together(counter, *times_of_hour) for counter in kept
        }
    line = await fairness_line(store)
    assert {name: line[name] for name in wanted} == wanted


def test_each_counter_with_a_metric_is_scraped_under_it() -> None:
    holder = Holder()
    holder.add("search")
    meters = Meters(holder)
    service = ServiceMeters(meters, lambda: 0.0)
    policy = Counting(1)
    sampler = ServiceSampler(policy, 0)
    strangers = []
    for times in (1, 2):
        samples = take(sampler, policy, times)
        strangers.append(replace(samples.teams[0], team_id=100 + times))  # both are the team `other`
        service.add(samples)
    service.add(msgspec.structs.replace(samples, teams=tuple(strangers)))
    found: dict[tuple[str, str], float] = {}
    for family in (*team_counters(meters, service), *team_gauges(meters, service)):
        found |= {(one.name, one.labels["team"]): one.value for one in family.samples if one.labels.keys() == {"team"}}
    for counter in TEAM_COUNTERS:
        if counter.metric is None:
            continue
        name = f"{counter.metric}_total" if counter.over is Over.SUM else counter.metric
        of_team, of_others = {Over.SUM: (3, 3), Over.MOST: (2, 2)}.get(counter.over, (2, 1))
        assert found[name, "search"] == as_shown(counter.name, NUMBERS[counter.name] * of_team)
        assert found[name, "other"] == as_shown(counter.name, NUMBERS[counter.name] * of_others)


def test_the_engine_fills_all_counters_that_no_policy_fills() -> None:
    """A name that the sampler leaves out would be 0 in every sample, and nobody would notice."""
    policy = Counting(1)
    totals = {team.team_id: team for team in policy.team_service()}
    (counted,) = ServiceSampler(policy, 0)._counted_here(totals, ()).values()
    assert counted.keys() == {counter.name for counter in ENGINE_COUNTERS}


# Puts one line into the list before anybody reads it, and its columns into the database as a migration would.
_PLANT = """
import sqlite3, sys, types
from pathlib import Path
import policies, pytest

path = Path(policies.__file__).with_name("team_counters.py")
before, line, after = path.read_text("utf-8").partition("    promoted_us: int")
planted = '    planted_us: int = _counter(Over.SUM, "Plants.", metric="terazi_planted", report="planted_seconds")'
module = types.ModuleType("policies.team_counters")
sys.modules[module.__name__] = policies.team_counters = module
exec(compile(before + planted + chr(10) + line + after, str(path), "exec"), module.__dict__)

from tenants import migrate
upgrade_to_head = migrate.upgrade

async def upgrade(url, **how):
    await upgrade_to_head(url, **how)
    database = sqlite3.connect(url.partition(":///")[2])
    for table in ("service_samples", "service_hours"):
        database.execute(f"ALTER TABLE {table} ADD COLUMN planted_us BIGINT DEFAULT 0 NOT NULL")
    database.close()

migrate.upgrade = upgrade
assert "planted_us" in module.POLICY_TOTALS
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "each", "--basetemp", *sys.argv[1:]]))
"""


def test_a_planted_counter_needs_its_line_and_its_columns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PLANT, str(tmp_path / "inner"), __file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
