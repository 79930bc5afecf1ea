"""Schedules that can be worked out by hand, through the production scheduler and core on a virtual clock.

The unit is one decode step of 1000 us; a prefill of p tokens is one atomic step of p units; (p, n) is a prefill of p
and n decodes after it. The prefill already yields a token, so such a request asks for n + 1.
"""

import itertools
from dataclasses import dataclass, replace

import pytest

from engine.clock import VirtualClock
from engine.plan import StepPlan, StepResult
from engine.sim.runner import SimRunner
from engine.wire.messages import TeamEntry
from policies.config import PolicyConfig
from policies.cost import StepProfile
from policies.eg_mlfq import EgMlfq
from policies.fcfs import Fcfs
from policies.policy import Policy
from tests.support.engine.simple_engine import Engine, submit, team

UNIT_US = 1000
PROFILE = StepProfile(
    fixed_us=0.0, prefill_token_us=1000.0, prefill_attention_us=0.0, decode_row_us=1000.0, decode_context_us=0.0
)


@dataclass(frozen=True)
class Job:
    name: str
    at: int
    prefill: int
    decodes: int
    team_id: int = 0
    level: int = 0


def quanta(*units: int) -> PolicyConfig:
    return PolicyConfig(levels=len(units) + 1, quanta_us=tuple(unit * UNIT_US for unit in units), theta_us=0)


class Timeline:
    """Plays jobs and keeps who ran in which unit."""

    def __init__(
        self,
        policy: Policy,
        jobs: list[Job],
        *,
        until: int = 10_000,
        slots: int = 1,
        teams: tuple[TeamEntry, ...] = (),
        **settings: int,
    ) -> None:
        self.clock = VirtualClock()
        self.runner = SimRunner(PROFILE, self.clock)
        self.names: list[str] = []
        self.ran: list[tuple[int, list[str]]] = []
        self.done: dict[str, int] = {}
        self.levels: dict[str, tuple[int, ...]] = {}
        self.preemptions: dict[str, int] = {}
        engine = Engine(
            policy=policy,
            profile=PROFILE,
            runner=self,
            clock=self.clock,
            context_len=100_000,
            teams=teams,
            max_batch_size=slots,
            **{"blocks": 10_000, "max_batch_tokens": 4096, "prefill_chunk_tokens": 4096, **settings},
        )
        waiting = sorted(jobs, key=lambda job: job.at)
        while (waiting or engine.core.has_work) and self.unit < until:
            while waiting and waiting[0].at <= self.unit:
                job = waiting.pop(0)
                self.names.append(job.name)
                message = submit(
                    job.name,
                    team_id=job.team_id,
                    prompt=job.prefill,
                    output=job.decodes + 1,
                    start_level=job.level,
                )
                assert engine.core.add(message) is None
            step = engine.core.step()
            if step is None:
                self.clock.advance_to(waiting[0].at * UNIT_US)
                continue
            for finished in step.finished:
                self.done[finished.request_id] = self.unit
                self.levels[finished.request_id] = finished.level_path
                self.preemptions[finished.request_id] = finished.num_preemptions

    @property
    def unit(self) -> int:
        return self.clock.now_us() // UNIT_US

    def execute(self, plan: StepPlan) -> StepResult:
        self.ran.append((self.unit, [self.names[row.seq_id] for row in plan.rows]))
        return self.runner.execute(plan)

    def release(self, seq_id: int) -> None:
        pass

    def starts(self, name: str) -> list[int]:
        return [unit for unit, names in self.ran if name in names]


@pytest.mark.case("O1")
def test_join_order() -> None:
    jobs = [Job("A", 0, 4, 2), Job("B", 0, 1, 1), Job("C", 0, 1, 2)]
    line = Timeline(EgMlfq(quanta(1, 2, 4, 8)), jobs)
    assert line.done == {"A": 11, "B": 3, "C": 5}
    assert Timeline(Fcfs(quanta(1, 2, 4, 8)), jobs).done == {"A": 6, "B": 8, "C": 11}


@pytest.mark.case("O2")
def test_when_a_short_one_preempts_the_long_one_falls() -> None:
    jobs = [Job("X", 0, 1, 9), Job("Y", 3, 1, 1)]
    line = Timeline(EgMlfq(quanta(2, 4, 8)), jobs)
    assert line.starts("Y") == [3, 4] and line.done == {"X": 12, "Y": 5}
    assert line.levels["X"] == (0, 1, 2)
    assert line.preemptions == {"X": 1, "Y": 0}
    fcfs = Timeline(Fcfs(quanta(2, 4, 8)), jobs)
    assert fcfs.done == {"X": 10, "Y": 12} and fcfs.preemptions == {"X": 0, "Y": 0}


@pytest.mark.case("O5")
def test_weights_two_to_one_alternate_two_to_one() -> None:
    jobs = [Job("A", 0, 1, 100, team_id=0), Job("B", 0, 1, 100, team_id=1)]
    teams = (team(0, weight=2), team(1, weight=1))
    line = Timeline(EgMlfq(PolicyConfig(levels=1, theta_us=0)), jobs, until=9, teams=teams)
    assert "".join(names[0] for _, names in line.ran) == "ABAABAABA"


@pytest.mark.case("O10")
@pytest.mark.parametrize(("theta", "runs_at"), [(0, [10, 12, 14]), (4, [10, 11, 12])])
def test_a_chat_job_wakes_up_beside_a_saturating_batch_team(theta: int, runs_at: list[int]) -> None:
    config = PolicyConfig(
        levels=4, quanta_us=(1_000_000, 2_000_000, 4_000_000), theta_us=theta * UNIT_US, step_cost_max_us=UNIT_US
    )
    jobs = [Job(f"batch{i}", 0, 1, 200, team_id=0, level=2) for i in range(3)]
    jobs.append(Job("chat", 10, 1, 2, team_id=1, level=0))
    line = Timeline(EgMlfq(config), jobs, until=30)
    assert line.starts("chat") == runs_at


@pytest.mark.case("O9")
def test_two_slots_shared_three_to_one() -> None:
    jobs = [Job(f"A{i}", 0, 1, 100, team_id=0) for i in range(5)] + [Job("B", 0, 1, 100, team_id=1)]
    teams = (team(0, weight=3), team(1, weight=1))
    line = Timeline(EgMlfq(PolicyConfig(levels=1, theta_us=0)), jobs, until=28, slots=2, teams=teams)
    # B's prompt waits until A is as far ahead as it makes A wait; its first decode comes while A still is.
    assert [len([n for n in names if n == "B"]) for _, names in line.ran[:4]] == [0, 0, 1, 1]
    assert [len([n for n in names if n == "B"]) for _, names in line.ran[4:12]] == [1, 0] * 4


@pytest.mark.case("C01", "O6")
def test_an_idle_teams_share_goes_to_the_busy_and_comes_back_at_once() -> None:
    jobs = [Job("A", 0, 1, 100, team_id=0), Job("B", 10, 1, 100, team_id=1)]
    line = Timeline(EgMlfq(PolicyConfig(levels=1, theta_us=0)), jobs, until=20)
    assert [names[0] for _, names in line.ran[:10]] == ["A"] * 10
    after = [names[0] for _, names in line.ran[10:20]]
    assert sorted(after) == ["A"] * 5 + ["B"] * 5 and all(a != b for a, b in itertools.pairwise(after))


@pytest.mark.case("C05")
def test_a_hundred_requests_at_once_do_not_pass_the_other_teams_one() -> None:
    jobs = [Job(f"B{i}", 0, 1, 0, team_id=1) for i in range(100)] + [Job("A", 0, 1, 0, team_id=0)]
    line = Timeline(EgMlfq(PolicyConfig(levels=1, theta_us=0)), jobs)
    assert line.starts("A") == [1], "right after the first of B's"
    assert Timeline(Fcfs(PolicyConfig(levels=1)), jobs).starts("A") == [100]


def test_with_one_slot_a_resident_behind_new_ones_progresses() -> None:
    jobs = [Job("long", 0, 1, 20, team_id=0, level=2)]
    jobs += [Job(f"new{i}", 1 + 2 * i, 1, 0, team_id=0, level=0) for i in range(15)]
    line = Timeline(EgMlfq(replace(quanta(2, 4, 8), coast=False)), jobs)
    assert len(line.done) == 16
    assert line.preemptions["long"] == 15 and line.done["long"] == 21 + 15


@pytest.mark.case("K30")
def test_a_high_one_gets_a_slot_from_long_low_ones_at_the_next_step() -> None:
    jobs = [Job(f"low{i}", 0, 1, 200, team_id=0, level=2) for i in range(4)]
    jobs.append(Job("high", 50, 2, 0, team_id=1, level=0))
    config = PolicyConfig(levels=4, quanta_us=(2000, 4000, 8000), theta_us=50_000)
    line = Timeline(EgMlfq(config), jobs, slots=4, until=120)
    step_units = 4  # rows of a step in simulation add up
    assert line.done["high"] - 50 <= 2 + 2 * step_units


@pytest.mark.case("K32")
def test_under_steady_arrivals_a_displaced_one_resumes_in_a_bound() -> None:
    theta, jobs = 10, [Job("displaced", 0, 1, 60, team_id=0, level=2)]
    jobs += [Job(f"new{i}", i, 1, 0, team_id=1, level=0) for i in range(400)]
    config = PolicyConfig(levels=4, quanta_us=(2000, 4000, 8000), theta_us=theta * UNIT_US, step_cost_max_us=UNIT_US)
    line = Timeline(EgMlfq(config), jobs)
    starts = line.starts("displaced")
    assert max(b - a for a, b in itertools.pairwise(starts)) <= 2 * (theta + 2)
    assert line.preemptions["displaced"] > 5


@pytest.mark.case("C10")
def test_a_long_prompt_holds_a_stream_up_by_one_chunk_at_a_time() -> None:
    jobs = [Job("stream", 0, 1, 60, team_id=0), Job("long", 5, 640, 0, team_id=1)]
    config = PolicyConfig(levels=1, theta_us=64 * UNIT_US)
    line = Timeline(EgMlfq(config), jobs, slots=2, prefill_chunk_tokens=64)
    starts = line.starts("stream")
    assert max(b - a for a, b in itertools.pairwise(starts)) <= 64 + 2


@pytest.mark.case("I14")
def test_one_team_on_one_level_is_first_come_first_served() -> None:
    jobs = [Job(f"J{i}", i * i % 7, 1 + i % 3, i % 5) for i in range(20)]
    one_level = Timeline(EgMlfq(PolicyConfig(levels=1, theta_us=0)), jobs, slots=3)
    fcfs = Timeline(Fcfs(PolicyConfig(levels=1)), jobs, slots=3)
    assert one_level.ran == fcfs.ran and one_level.done == fcfs.done
