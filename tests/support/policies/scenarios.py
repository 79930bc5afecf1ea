"""Random workloads for property tests: teams, jobs, closed loops, aborts, refusals, and costs that differ from work."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from hypothesis import strategies as st

from policies.config import PolicyConfig
from policies.sequences import Overhead
from tests.support.policies.driver import UNIT, Driver, Job, config


@dataclass(frozen=True)
class JobPlan:
    team: int  # index into the scenario's teams
    at: int
    prefill: int
    decodes: int
    level: int
    abort_after: int | None
    think: int | None  # a closed loop sends the job again that long after it ended


@dataclass(frozen=True)
class Coast:
    """Thresholds of CV^2 in percent, and over how many completions."""

    below: int
    above: int
    window: int
    least: int


@dataclass(frozen=True)
class Promotion:
    """Budgets: eta in percent, G and alpha in units, sigma in grants."""

    percent: int
    grant: int
    alpha: int
    burst: int


PROMOTIONS = (Promotion(20, 2, 4, 1), Promotion(60, 1, 2, 4), Promotion(5, 3, 10, 2))

# From the first completion on for ever; often to and fro; and the real thresholds over few completions.
COASTS = (Coast(10**9, 10**9, 256, 1), Coast(20, 20, 3, 1), Coast(80, 120, 8, 2))


@dataclass(frozen=True)
class Scenario:
    weights: tuple[int, ...]
    slots: int
    levels: int
    theta: int | None
    chunk: int
    jobs: tuple[JobPlan, ...]
    refusals: int  # percent of tries that find no room
    skew: int  # 0: cost is work; otherwise a seed for costs that are not
    seed: int
    coast: Coast | None = None
    promotion: Promotion | None = None
    swaps: int = 0  # percent of steps before which an upload ends
    overheads: int = 0  # percent of steps that cost some team something beside its rows

    @property
    def bound(self) -> int:
        """The most units one sequence costs in one step."""
        return max([1, *(min(self.chunk, job.prefill) for job in self.jobs)])

    @property
    def u(self) -> Fraction:
        """`bound` over the least weight."""
        return Fraction(self.bound, min(self.weights))

    def settings(self, unit: int = UNIT) -> PolicyConfig:
        """The policy's configuration."""
        plain = config([2**k for k in range(self.levels)], theta=self.theta, u=self.bound, unit=unit)
        if self.promotion is not None:
            plain = replace(plain, promotion_percent=self.promotion.percent, grant_us=self.promotion.grant * unit)
        coast = self.coast
        if coast is None:
            return plain
        return replace(
            plain,
            coast=True,
            coast_below_percent=coast.below,
            coast_above_percent=coast.above,
            coast_completions=coast.window,
            coast_completions_min=coast.least,
        )

    def driver(self, unit: int = UNIT, **more: object) -> Driver:
        """A driver with this scenario's arrivals in its future."""
        weights = dict(enumerate(self.weights))
        if self.promotion is not None:
            more = {"alpha": self.promotion.alpha, "burst": self.promotion.burst, **more}
        driver = Driver(self.settings(unit), weights, self.slots, unit=unit, **more)  # type: ignore[arg-type]
        loops: dict[int, JobPlan] = {}

        def send(plan: JobPlan) -> None:
            seq_id = driver.add(plan.team, plan.prefill, plan.decodes, plan.level, f"j{len(driver.jobs)}", self.chunk)
            loops[id(driver.jobs[seq_id])] = plan
            if plan.abort_after is not None:
                driver.at(driver.now + plan.abort_after, lambda: driver.abort(seq_id))

        def again(job: Job) -> None:
            plan = loops[id(job)]
            if plan.think is not None:
                driver.at(driver.now + plan.think, lambda: send(plan))

        for plan in self.jobs:
            driver.at(plan.at, lambda plan=plan: send(plan))
        driver.on_done.append(again)
        if self.refusals:
            driver.has_room = self._room(driver)
        if self.skew:
            driver.costs = self._costs()
        if self.swaps:
            driver.between = self._uploads(driver)
        if self.overheads:
            driver.overheads = self._bills(unit)
        return driver

    def _uploads(self, driver: Driver) -> Callable[[], None]:
        source = random.Random(f"uploads {self.seed}")

        def upload() -> None:
            if driver.live and source.randrange(100) < self.swaps:
                driver.upload(source.choice(list(driver.live)), source.choice((1, 3, 8)))

        return upload

    def _bills(self, unit: int) -> Callable[[], list[Overhead]]:
        source = random.Random(f"overheads {self.seed}")

        def bills() -> list[Overhead]:
            if source.randrange(100) >= self.overheads:
                return []
            teams = range(len(self.weights))
            return [Overhead(source.choice(teams), source.randrange(2 * unit)) for _ in range(source.randint(1, 3))]

        return bills

    def _room(self, driver: Driver) -> Callable[[Job], bool]:
        def has_room(job: Job) -> bool:
            return random.Random(f"{self.seed} {driver.now} {job.label}").randrange(100) >= self.refusals

        return has_room

    def _costs(self) -> Callable[[list[int]], list[int]]:
        source = random.Random(self.skew)

        def costs(works: list[int]) -> list[int]:
            return [work * source.randrange(50, 200) // 100 + source.randrange(7) for work in works]

        return costs


def scenarios(
    max_teams: int = 5,
    slots: int = 5,
    refusals: bool = False,
    skew: bool = False,
    loops: bool = True,
    infinite: bool = False,
    only_infinite: bool = False,
    promotion: bool = False,
) -> st.SearchStrategy[Scenario]:
    """Workloads of up to `max_teams` teams with weights 1 to 4; in most of them teams may coast."""

    @st.composite
    def build(draw: st.DrawFn) -> Scenario:
        teams = draw(st.integers(1, max_teams))
        plan = st.builds(
            JobPlan,
            team=st.integers(0, teams - 1),
            at=st.integers(0, 30),
            prefill=st.sampled_from([0, 0, 1, 1, 3, 9]),
            decodes=st.sampled_from([1, 1, 2, 5, 30]),
            level=st.integers(0, 3),
            abort_after=st.none() | st.integers(1, 20) if loops else st.none(),
            think=st.none() | st.integers(0, 3) if loops else st.none(),
        )
        thetas: list[int | None] = [] if only_infinite else [0, 1, 3, 20]
        return Scenario(
            weights=tuple(draw(st.lists(st.integers(1, 4), min_size=teams, max_size=teams))),
            slots=draw(st.integers(1, slots)),
            levels=draw(st.integers(1, 4)),
            theta=draw(st.sampled_from(thetas + [None] * infinite)),
            chunk=draw(st.sampled_from([2, 1 << 20])),
            jobs=tuple(draw(st.lists(plan, min_size=1, max_size=16))),
            refusals=draw(st.sampled_from([0, 30, 80])) if refusals else 0,
            skew=draw(st.integers(1, 9)) if skew else 0,
            seed=draw(st.integers(0, 9)),
            coast=draw(st.sampled_from([None, *COASTS])),
            promotion=draw(st.sampled_from([None, *PROMOTIONS])) if promotion else None,
            swaps=draw(st.sampled_from([0, 30])) if promotion else 0,
        )

    return build()


def random_scenario(seed: int) -> Scenario:
    """A fuller workload than hypothesis starts with: half of the seeds with refusals, a third with skewed costs, in
    three quarters teams may coast, in half there are promotions, in a third uploads and overheads.
    """
    source = random.Random(seed)
    teams = source.randint(1, 5)

    def plan() -> JobPlan:
        return JobPlan(
            team=source.randrange(teams),
            at=source.randint(0, 30),
            prefill=source.choice([0, 0, 1, 1, 3, 9]),
            decodes=source.choice([1, 1, 2, 5, 30]),
            level=source.randint(0, 3),
            abort_after=source.choice([None, None, source.randint(1, 20)]),
            think=source.choice([None, source.randint(0, 3)]),
        )

    return Scenario(
        weights=tuple(source.randint(1, 4) for _ in range(teams)),
        slots=source.randint(1, 5),
        levels=source.randint(1, 4),
        theta=source.choice([0, 1, 3, 20, None]),
        chunk=source.choice([2, 1 << 20]),
        jobs=tuple(plan() for _ in range(source.randint(1, 16))),
        refusals=source.choice([0, 30, 80]) if seed % 2 else 0,
        skew=source.randint(1, 9) if seed % 3 == 0 else 0,
        seed=seed,
        coast=source.choice([None, *COASTS]),
        promotion=source.choice([None, None, None, *PROMOTIONS]),
        swaps=source.choice([0, 0, 30]),
        overheads=source.choice([0, 0, 50]),
    )
