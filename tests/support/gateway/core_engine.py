"""The production core behind the socket, with small pools, on a clock and a step that the test moves."""

import random
from pathlib import Path

import pytest

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.request import Sequence
from engine.sim.delayed import DelayedCopies
from engine.sim.runner import SimRunner
from engine.step.core import EngineCore
from engine.step.log import StepLog, StepLogStart
from engine.step.scheduler import Scheduler
from engine.wire.framing import encode
from engine.wire.messages import Abort, ConfigureTeams, FromGateway, Hello, StepDone, Submit
from policies.catalog import make_policy
from policies.config import from_profile
from policies.cost import StepProfile
from tests.support.engine.moments import Cut, moment_of, num_steps
from tests.support.engine.simple_engine import submit, team
from tests.support.gateway.fake_engine import EOS, FakeEngine, hello

BLOCK_SIZE = 4
DEVICE_BLOCKS = 64
HOST_BLOCKS = 64
FILLER_TEAM = 9
PROFILE = StepProfile(
    fixed_us=300.0, prefill_token_us=40.0, prefill_attention_us=0.5, decode_row_us=90.0, decode_context_us=0.7
)


def small_hello() -> Hello:
    """The greeting of an engine whose pools hold about two requests."""
    return hello(block_size=BLOCK_SIZE, num_device_blocks=DEVICE_BLOCKS, num_host_blocks=HOST_BLOCKS, context_len=240)


class CoreEngine(FakeEngine):
    """Requests come in over the socket; a step is made, and told, when the test says so.

    Fillers are requests of another, weightier team that no gateway knows: they take slots and blocks from the one the
    test looks at.
    """

    def __init__(self, path: Path, greeting: Hello, max_delay: int = 0) -> None:
        """`max_delay`: steps that a copy may take longer than its own."""
        super().__init__(path, greeting)
        config = EngineConfig(
            kind="sim", block_size=BLOCK_SIZE, max_batch_size=2, max_batch_tokens=24, prefill_chunk_tokens=16
        )
        self.clock = VirtualClock()
        self.log_path = path.with_name("steps.jsonl")
        self.cuts: list[Cut] = []  # aborts of live requests
        self.latest: StepDone | None = None
        context_len = greeting.model.context_len
        constants = from_profile(
            PROFILE, levels=4, fairness_window_us=5_000, coast=False, chunk_tokens=16, context_len=context_len
        )
        self.scheduler = Scheduler(
            config,
            make_policy("eg-mlfq", constants),
            PROFILE,
            DEVICE_BLOCKS,
            eos_token_ids=(EOS,),
            num_host_blocks=HOST_BLOCKS,
            block_copy_us=2.0,
        )
        start = StepLogStart(
            engine_id="core",
            epoch=1,
            num_device_blocks=DEVICE_BLOCKS,
            num_host_blocks=HOST_BLOCKS,
            block_size=BLOCK_SIZE,
        )
        runner = DelayedCopies(SimRunner(PROFILE, self.clock, block_copy_us=2.0), 1, max_delay=max_delay)
        log = StepLog(self.log_path, 1 << 30, start, pytest.fail)
        self.core = EngineCore(config, self.scheduler, runner, self.clock, greeting.model, log)
        teams = (*(team(team_id) for team_id in (1, 2, 3)), team(FILLER_TEAM, weight=8))
        self.core.configure(ConfigureTeams(teams=teams))
        self._rng = random.Random(3)
        self._num_fillers = 0

    def _take(self, message: FromGateway) -> None:
        if isinstance(message, Submit):
            assert self.core.add(message) is None
            self.submitted.append(message)
            self._submits.put_nowait(message)
        elif isinstance(message, Abort):
            sequence = self.find(message.request_id)
            if sequence is not None:
                self.cuts.append(Cut(message.request_id, moment_of(sequence), num_steps(self.log_path)))
            self.core.abort(message.request_id)
            self.aborted.append(message.request_id)
            self._aborts.put_nowait(message.request_id)
        else:
            self.teams = message

    def advance(self) -> None:
        """One step boundary, and the message about it."""
        done = self.core.step()
        self.scheduler.check()
        if done is not None:
            self.latest = done
            self.finished += done.finished
            if self._writer is not None:
                self.num_frames_sent += 1
                self._writer.write(encode(done))

    def find(self, request_id: str) -> Sequence | None:
        """The live sequence of a request."""
        live = self.scheduler.sequences.values()
        return next((sequence for sequence in live if sequence.request.request_id == request_id), None)

    def fill(self, is_long: bool = False) -> None:
        """One more request of the other team. Long ones crowd others out; short ones make the line before it."""
        self._num_fillers += 1
        prompt = self._rng.randint(20, 60)
        output = self._rng.randint(100, 180) if is_long else self._rng.randint(30, 60)
        filler = submit(f"filler-{self._num_fillers}", team_id=FILLER_TEAM, prompt=prompt, output=output)
        assert self.core.add(filler) is None

    def saturate(self) -> None:
        """Fillers until no more of them may start."""
        while self.scheduler.memory.num_waiting < 3:
            self.fill()
            self.advance()

    def bring(self, request_id: str, moment: str) -> Sequence:
        """Make steps until the request stands there; fillers come as long as that takes."""
        for _ in range(2_000):
            sequence = self.find(request_id)
            if sequence is not None and moment_of(sequence) == moment:
                return sequence
            if self.scheduler.num_live < 12:
                self.fill(is_long=moment == "swapped")
            self.advance()
        raise AssertionError(f"{request_id} was never {moment}")

    def run_dry(self) -> None:
        """Let everything end that can."""
        for _ in range(5_000):
            if not self.core.has_work:
                return
            self.advance()
        raise AssertionError("no end in sight")
