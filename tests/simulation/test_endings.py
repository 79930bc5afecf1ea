"""Aborts at random moments under memory pressure, and what the step log says of them afterwards.

The production core and scheduler on the simulated runner, with copies that end some steps late. The pools hold a part
of what is asked for, so sequences are found in every status there is; then one is cut off, between two steps or in the
middle of one. What must hold is read from the step log, as an operator would.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.plan import BlockCopy, StepPlan
from engine.sim.delayed import DelayedCopies
from engine.sim.runner import SimRunner
from engine.step.core import EngineCore
from engine.step.log import StepLog, StepLogStart
from engine.step.scheduler import Scheduler
from engine.wire.messages import ConfigureTeams, Finished, ModelInfo
from policies.catalog import make_policy
from policies.config import from_profile
from policies.cost import StepProfile
from tests.support.engine.moments import MOMENTS, Cut, check_cuts, moment_of, num_steps, planned, read_steps
from tests.support.engine.simple_engine import submit, team

PROFILE = StepProfile(
    fixed_us=300.0, prefill_token_us=40.0, prefill_attention_us=0.5, decode_row_us=90.0, decode_context_us=0.7
)
NUM_TEAMS = 3
CONTEXT_LEN = 160
BLOCK_SIZE = 4
DEVICE_BLOCKS = 44
HOST_BLOCKS = 30
MODES = ("proactive", "reactive", "recompute", "proactive", "proactive") * 2  # one run each
BLOCK_COPY_US = 2.0
MAX_QUEUE_US = 30_000
CUTS = 20  # of each run


@dataclass
class Engine:
    """A core with small pools and a step log."""

    path: Path
    rng: random.Random
    mode: str
    is_lossy: bool = False  # some copies never end by themselves
    finished: list[Finished] = field(default_factory=list)
    num_submitted: int = 0

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.mid_step: Callable[[], None] | None = None
        runner = DelayedCopies(
            SimRunner(PROFILE, self.clock, block_copy_us=BLOCK_COPY_US),
            self.rng.randrange(1000),
            max_delay=4,
            lose_one_in=30 if self.is_lossy else 0,
            on_plan=self._on_plan,
        )
        config = EngineConfig(
            kind="sim",
            block_size=BLOCK_SIZE,
            max_batch_size=4,
            max_batch_tokens=12,
            prefill_chunk_tokens=8,
            memory_preemption=self.mode,
        )
        constants = from_profile(
            PROFILE, levels=4, fairness_window_us=20_000, coast=False, chunk_tokens=8, context_len=CONTEXT_LEN
        )
        self.scheduler = Scheduler(
            config,
            make_policy("eg-mlfq", constants),
            PROFILE,
            DEVICE_BLOCKS,
            num_host_blocks=HOST_BLOCKS,
            block_copy_us=BLOCK_COPY_US,
        )
        start = StepLogStart(
            engine_id="eng-test",
            epoch=1,
            num_device_blocks=DEVICE_BLOCKS,
            num_host_blocks=self.scheduler.memory.host.num_blocks,
            block_size=BLOCK_SIZE,
        )
        log = StepLog(self.path, 1 << 30, start, pytest.fail)
        model = ModelInfo(
            name="sim", path="", vocab_size=256, context_len=CONTEXT_LEN, eos_token_ids=(), dtype="", device=""
        )
        self.core = EngineCore(config, self.scheduler, runner, self.clock, model, log)
        self.core.configure(ConfigureTeams(teams=tuple(team(i, weight=1 + i) for i in range(NUM_TEAMS))))

    def _on_plan(self, plan: StepPlan, in_flight: dict[int, BlockCopy]) -> None:
        action, self.mid_step = self.mid_step, None
        if action is not None:
            action()

    def submit(self, **kwargs: Any) -> str:
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        assert self.core.add(submit(request_id, **kwargs)) is None
        return request_id

    def overload(self, max_queue_us: int = 0) -> list[str]:
        """Requests of any team and size, so that 14 are live; returns the new ones."""
        rng = self.rng
        return [
            self.submit(
                team_id=rng.randrange(NUM_TEAMS),
                prompt=rng.randint(1, 60),
                output=rng.randint(2, 60),
                max_queue_us=max_queue_us,
            )
            for _ in range(14 - len(self.core.request_ids))
        ]

    def step(self) -> None:
        done = self.core.step()
        self.scheduler.check()
        if done is not None:
            self.finished += done.finished

    def run(self) -> None:
        for _ in range(20_000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("no end in sight")

    def start(self) -> dict[str, Any]:
        with self.path.open() as file:
            return dict(json.loads(file.readline()))


def cut_at_random(engine: Engine, counts: Counter[str]) -> list[Cut]:
    """Keep the engine overloaded and abort `CUTS` sequences at random; moments cut least so far are more likely."""
    rng = engine.rng
    cuts: list[Cut] = []
    gone: set[str] = set()
    while len(cuts) < CUTS:
        engine.overload()
        there: dict[str, list[str]] = {}
        for sequence in engine.scheduler.sequences.values():
            if sequence.request.request_id not in gone:
                there.setdefault(moment_of(sequence), []).append(sequence.request.request_id)
        moment = min(sorted(there), key=lambda name: counts[name], default=None)
        if moment is not None and rng.random() < (0.3 if counts[moment] == min(counts.values()) else 0.02):
            request_id, is_mid_step = rng.choice(there[moment]), rng.random() < 0.5
            cuts.append(Cut(request_id, moment, num_steps(engine.path) + is_mid_step, is_mid_step))
            counts[moment] += 1
            gone.add(request_id)
            if is_mid_step:
                engine.mid_step = partial(engine.core.abort, request_id)
            else:
                engine.core.abort(request_id)
        engine.step()
    engine.run()
    return cuts


def check_log(engine: Engine, cuts: list[Cut]) -> None:
    lines = read_steps(engine.path)
    ended = Counter(end["request"] for line in lines for end in line["ended"])
    assert ended == Counter({f"r{number}": 1 for number in range(engine.num_submitted)}), "each ends once"
    assert Counter(finished.request_id for finished in engine.finished) == ended
    check_cuts(lines, cuts)
    start, last = engine.start(), lines[-1]
    assert last["free_blocks"] == start["num_device_blocks"] and last["free_host_blocks"] == start["num_host_blocks"]


@pytest.mark.case("K40", "I15")
def test_200_aborts_at_random_moments(tmp_path: Path) -> None:
    counts: Counter[str] = Counter(dict.fromkeys(MOMENTS, 0))
    num_mid_step = num_lost = 0
    for seed, mode in enumerate(MODES):
        engine = Engine(tmp_path / f"{seed}.jsonl", random.Random(seed), mode, is_lossy=seed % 2 == 1)
        cuts = cut_at_random(engine, counts)
        check_log(engine, cuts)
        num_mid_step += sum(cut.is_mid_step for cut in cuts)
        num_lost += sum(len(line["copies_failed"]) for line in read_steps(engine.path))
    assert counts.total() == 200
    assert min(counts.values()) >= 8 and 60 <= num_mid_step <= 140 and num_lost >= 4, (counts, num_mid_step, num_lost)


@pytest.mark.parametrize("mode", ["proactive", "recompute"])
def test_a_lost_gateway_ends_everything_wherever_it_stands(tmp_path: Path, mode: str) -> None:
    found: set[str] = set()
    for seed in range(8):
        engine = Engine(tmp_path / f"{seed}.jsonl", random.Random(seed), mode)
        while engine.num_submitted < 30 + 4 * seed:
            engine.overload()
            engine.step()
        found.update(map(moment_of, engine.scheduler.sequences.values()))
        num_lines = num_steps(engine.path)
        for request_id in sorted(engine.core.request_ids):
            engine.core.abort(request_id)
        engine.run()
        assert not any(map(planned, read_steps(engine.path)[num_lines:]))
        check_log(engine, [])
    assert found >= {"waiting", "prefill", "running", "swapped" if mode == "proactive" else "dropped"}


@pytest.mark.parametrize("mode", ["proactive", "recompute"])
def test_only_what_has_not_started_in_time_ends_with_timeout(tmp_path: Path, mode: str) -> None:
    engine = Engine(tmp_path / "steps", random.Random(1), mode)
    arrived_us: dict[str, int] = {}
    late: set[str] = set()  # moments at which a started sequence was past its queue time
    while engine.num_submitted < 120:
        for request_id in engine.overload(max_queue_us=MAX_QUEUE_US):
            arrived_us[request_id] = engine.clock.now_us()
        engine.step()
        for sequence in engine.scheduler.sequences.values():
            if engine.clock.now_us() >= arrived_us[sequence.request.request_id] + MAX_QUEUE_US:
                late.add(moment_of(sequence))
    engine.run()
    check_log(engine, [])
    began_us: dict[str, int] = {}
    timeouts: dict[str, int] = {}
    previous_us = 0
    for line in read_steps(engine.path):
        at_us = line["at_us"]
        for end in line["ended"]:
            if end["reason"] == "timeout":
                timeouts[end["request"]] = at_us
                due_us = arrived_us[end["request"]] + MAX_QUEUE_US
                assert previous_us < due_us <= at_us, "at the first boundary that is not before it"
        for row in line["rows"]:
            began_us.setdefault(row["request"], at_us)
        previous_us = at_us
    assert not began_us.keys() & timeouts.keys(), "what has had a step is never late"
    assert began_us.keys() | timeouts.keys() == arrived_us.keys()
    assert all(at_us < arrived_us[request_id] + MAX_QUEUE_US for request_id, at_us in began_us.items())
    assert len(timeouts) >= 20 and len(began_us) >= 20
    assert late >= {"running", "paused", "swapped" if mode == "proactive" else "dropped"}


def test_the_queue_time_ends_with_its_last_microsecond(tmp_path: Path) -> None:
    ends = []
    for waited_us in (MAX_QUEUE_US - 1, MAX_QUEUE_US):
        engine = Engine(tmp_path / f"{waited_us}", random.Random(0), "proactive")
        engine.submit(prompt=5, output=5, max_queue_us=MAX_QUEUE_US)
        engine.clock.advance(waited_us)
        engine.run()
        check_log(engine, [])
        ends += [finished.reason for finished in engine.finished]
    assert ends == ["length", "timeout"]
