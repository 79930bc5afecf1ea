"""Runs a policy the way the oracles (`test_oracles`) are written: slots, unit steps, a virtual clock.

A unit is one decode step and costs UNIT microseconds; cost is work. (p, n) is a prefill of p units, done in one atomic
step (or in chunks), then n decodes. A step lasts as long as its longest part.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from policies.books import MeteredPolicy
from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.sequences import AS_SERVED, Overhead, SequenceTerms, Served, Starving, StepTime, TeamTerms

UNIT = 27_720  # divisible by 1..12, so that the shares of small oracles are whole microseconds

INFINITE = None


def config(
    quanta: Iterable[int] = (1, 2, 4, 8), theta: Fraction | int | None = 0, u: int = 1, unit: int = UNIT, **more: int
) -> PolicyConfig:
    """Levels, Theta and the bound on one sequence's cost in a step, in units. Theta None is infinite.

    Nobody coasts unless `coast=True` is given, and nobody is promoted unless `promotion_percent` is: most oracles are
    about levels and the gate.
    """
    quanta = tuple(quanta)
    chosen = PolicyConfig(
        levels=len(quanta),
        quanta_us=tuple(q * unit for q in quanta),
        theta_us=0 if theta is None else int(theta * unit),
        is_gated=theta is not None,
        step_cost_max_us=u * unit,
        decode_work_us=unit,
        chunk_work_us=u * unit,
        coast=False,
        promotion_percent=0,
    )
    return replace(chosen, **more)


@dataclass
class Job:
    label: str
    team: int
    prefill: int  # units left
    decodes: int
    chunk: int
    prompt: int  # units of prefill in all
    arrived: int
    done: int | None = None
    starts: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.prefill == 0 and self.decodes <= 0

    def next_units(self) -> int:
        return min(self.prefill, self.chunk) if self.prefill else 1


class Driver:
    """One policy, its jobs, and what it did: `trace` holds (start in units, labels in order of picking)."""

    def __init__(
        self,
        settings: PolicyConfig,
        weights: dict[int, int],
        slots: int = 1,
        policy: str = "eg-mlfq",
        unit: int = UNIT,
        has_room: Callable[[Job], bool] = lambda job: True,
        costs: Callable[[list[int]], list[int]] = lambda works: works,
        instance: MeteredPolicy | None = None,
        alpha: int | None = None,
        burst: int = 1,
        is_timed: bool = False,
    ) -> None:
        """`is_timed`: steps take as long as all their parts, and decodes wait for prefills beside them."""
        made = instance or make_policy(policy, settings)
        self.is_timed = is_timed
        self.policy: MeteredPolicy = made  # type: ignore[assignment]
        self.costs = costs
        self.unit = unit
        self.slots = slots
        self.has_room = has_room
        self.weights = weights
        starving_after = 1 << 60 if alpha is None else alpha * unit
        self.policy.configure(
            [TeamTerms(team, weight, 0, starving_after, burst) for team, weight in weights.items()], 0
        )
        self.now = 0
        self.jobs: dict[int, Job] = {}
        self.live: dict[int, Job] = {}
        self.future: list[tuple[int, int, Callable[[], object]]] = []
        self.on_done: list[Callable[[Job], object]] = []
        self.between: Callable[[], object] = lambda: None  # before each step
        self.overheads: Callable[[], list[Overhead]] = list  # of each step
        self.trace: list[tuple[int, list[str]]] = []
        self.max_gap = Fraction(0)
        self.starving: list[Starving] = []  # who began to starve as the latest step began
        self._min_runs: dict[int, int] = {}  # steps left, by sequence: what the memory counts
        self.largest = 0  # the largest cost of one sequence in one step so far, in units

    def add(
        self,
        team: int,
        prefill: int,
        decodes: int,
        level: int = 0,
        label: str = "",
        chunk: int = 1 << 40,
        join_work: int | None = None,
    ) -> int:
        """A job that arrives now. `join_work` overrides the work that decides its level."""
        seq_id = len(self.jobs)
        job = Job(label or "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[team % 26], team, prefill, decodes, chunk, prefill, self.now)
        self.jobs[seq_id] = self.live[seq_id] = job
        work = (prefill if join_work is None else join_work) * self.unit
        self.policy.arrive(
            SequenceTerms(seq_id, team, prefill, 0, work, level, self.now * self.unit), self.now * self.unit
        )
        return seq_id

    def at(self, time: int, call: Callable[[], object]) -> None:
        """Do `call` at the first step boundary not before `time`."""
        self.future.append((time, len(self.future), call))

    def upload(self, seq_id: int, num_steps: int) -> None:
        """Its KV is back, and a minimum run of so many steps begins."""
        self.policy.fits_again(seq_id)
        self._protect(seq_id, num_steps)

    def _protect(self, seq_id: int, num_steps: int) -> None:
        self._min_runs[seq_id] = num_steps
        self.policy.protect(seq_id, num_steps)

    def abort(self, seq_id: int) -> None:
        """The caller has left."""
        self._min_runs.pop(seq_id, None)
        if self.live.pop(seq_id, None) is not None:
            self.policy.leave(seq_id, self.now * self.unit)

    def step(self) -> list[str]:
        """One step. With nothing to run, the clock moves to the next arrival, or by one unit."""
        self._deliver()
        self.between()
        policy, now_us = self.policy, self.now * self.unit
        self.starving = policy.begin(now_us)
        picked: list[int] = []
        tried: set[int] = set()
        while len(picked) < self.slots:
            seq_id = policy.best()
            assert policy.best() == seq_id, "asking twice changed the answer"
            if seq_id is None:
                break
            assert seq_id in self.live and seq_id not in tried
            tried.add(seq_id)
            job = self.live[seq_id]
            if self.has_room(job):
                policy.take(seq_id, job.next_units() * self.unit)
                picked.append(seq_id)
            else:
                policy.refuse(seq_id)
        self.left_out = len(self.live) - len(tried)
        works, longest = [], 0
        decodes = [seq_id for seq_id in picked if not self.live[seq_id].prefill]
        for seq_id in picked:
            job = self.live[seq_id]
            units = job.next_units()
            longest = max(longest, units)
            job.starts.append(self.now)
            if job.prefill:
                job.prefill -= units
            else:
                job.decodes -= 1
            works.append(units * self.unit)
        served = [
            Served(seq_id, work, cost, self.live[seq_id].prefill == 0, self.live[seq_id].is_over, seq_id in decodes)
            for seq_id, work, cost in zip(picked, works, self.costs(works), strict=True)
        ]
        labels = [self.live[seq_id].label for seq_id in picked]
        if picked:
            self.trace.append((self.now, labels))
        self.largest = max(self.largest, longest)
        self.now += longest or self._idle()
        time = AS_SERVED
        if self.is_timed and decodes:
            time = StepTime(
                sum(works), sum(work for seq_id, work in zip(picked, works, strict=True) if seq_id in decodes)
            )
        policy.settle(served, self.now * self.unit, self.overheads(), time)
        self.max_gap = max(self.max_gap, self.gap())
        for seq_id in picked:
            if self._min_runs.get(seq_id):
                self._protect(seq_id, self._min_runs[seq_id] - 1)
            job = self.live[seq_id]
            if job.is_over:
                job.done = self.now
                del self.live[seq_id]
                policy.leave(seq_id, self.now * self.unit)
                for call in self.on_done:
                    call(job)
        return labels

    def run(self, until: int | None = None) -> "Driver":
        """Steps until everything is done, or until the clock reaches `until`."""
        while self.now < until if until is not None else bool(self.live or self.future):
            self.step()
        return self

    def gap(self) -> Fraction:
        """Largest D minus least D, in units per weight."""
        lags = self.policy.lags().values()
        return (max(lags) - min(lags)) / self.unit if lags else Fraction(0)

    def done(self) -> dict[str, int | None]:
        """When each job ended, by label."""
        return {job.label: job.done for job in self.jobs.values()}

    def starts(self, label: str) -> list[int]:
        """When the steps of the jobs with this label began."""
        return [start for start, labels in self.trace for one in labels if one == label]

    def served(self) -> dict[int, int]:
        """Units served by team."""
        return {team.team_id: team.served_us // self.unit for team in self.policy.team_service()}

    def _deliver(self) -> None:
        due = sorted(entry[:2] for entry in self.future if entry[0] <= self.now)
        calls = {entry[:2]: entry[2] for entry in self.future}
        self.future = [entry for entry in self.future if entry[0] > self.now]
        for key in due:
            calls[key]()

    def _idle(self) -> int:
        return max(1, min(entry[0] for entry in self.future) - self.now) if self.future else 1
