"""What the engine's tests share: a policy simple enough to check by eye, and short ways to build an engine."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.sim.runner import SimRunner
from engine.step.core import EngineCore, Runner
from engine.step.pauses import Pauses
from engine.step.scheduler import Scheduler
from engine.wire.messages import ConfigureTeams, ModelInfo, SamplingParams, StepDone, Submit, TeamEntry
from policies.cost import StepProfile
from policies.policy import Policy
from policies.sequences import (
    AS_SERVED,
    Overhead,
    SequenceTerms,
    Served,
    Starving,
    StepTime,
    TeamService,
    TeamTerms,
    Turn,
)

UNIT_PROFILE = StepProfile(
    fixed_us=0.0, prefill_token_us=10.0, prefill_attention_us=0.0, decode_row_us=1000.0, decode_context_us=0.0
)


class ArrivalOrder:
    """Ranks by `seq_id` and checks that the scheduler keeps to the protocol of `policies.policy`."""

    name = "arrival-order"

    def __init__(self) -> None:
        self.live: dict[int, SequenceTerms] = {}
        self.team_ids: set[int] = set()
        self.charged_us: dict[int, int] = {}
        self.overhead_us: dict[int, int] = {}  # by team
        self.taken: list[int] = []
        self.refused: list[int] = []
        self.left: list[int] = []  # passed over in the latest step
        self.prompt_us: int | None = None  # what prompts of a team may take beside others
        self.is_picking = False
        self._tried: set[int] = set()
        self._ever_taken: set[int] = set()
        self._begun: set[int] = set()  # with a token
        self.away: set[int] = set()
        self.is_wide = False

    def configure(self, teams: Iterable[TeamTerms], now_us: int) -> None:
        assert not self.is_picking
        self.team_ids = {team.team_id for team in teams}

    def arrive(self, sequence: SequenceTerms, now_us: int) -> int:
        assert not self.is_picking and sequence.seq_id not in self.live
        if sequence.team_id not in self.team_ids:
            raise KeyError(sequence.team_id)
        self.live[sequence.seq_id] = sequence
        return sequence.start_level

    def fits_again(self, seq_id: int) -> None:
        assert not self.is_picking and seq_id in self.live

    def begin(self, now_us: int) -> list[Starving]:
        assert not self.is_picking
        self.is_picking = True
        self._tried, self.taken, self.refused, self.left = set(), [], [], []
        return []

    def best(self) -> int | None:
        assert self.is_picking
        return next((seq_id for seq_id in sorted(self.live) if seq_id not in self._tried), None)

    def take(self, seq_id: int, work_us: int, cost_us: int | None = None) -> None:
        assert seq_id == self.best() and work_us >= 0 and (cost_us is None or cost_us >= 0)
        self._tried.add(seq_id)
        self._ever_taken.add(seq_id)
        self.taken.append(seq_id)

    def refuse(self, seq_id: int) -> None:
        assert seq_id == self.best()
        self._tried.add(seq_id)
        self.refused.append(seq_id)

    def refuse_new(self) -> None:
        assert self.is_picking
        new = [seq_id for seq_id in self.live if seq_id not in self._ever_taken and seq_id not in self._tried]
        self._tried.update(new)
        self.refused += new

    def prompt_time_us(self, team_id: int, others: Mapping[int, int], step_us: int) -> int | None:
        assert self.is_picking and team_id not in others and sum(others.values()) <= step_us
        return self.prompt_us

    def leave_prompts(self, team_id: int) -> None:
        self._leave(team_id, self._begun)

    def leave_new(self, team_id: int) -> None:
        self._leave(team_id, self._ever_taken)

    def leave_team(self, team_id: int) -> None:
        self._leave(team_id, set())

    def _leave(self, team_id: int, stay: set[int]) -> None:
        best = self.best()
        assert best is not None and self.live[best].team_id == team_id and best not in stay
        left = [seq_id for seq_id, terms in self.live.items() if terms.team_id == team_id and seq_id not in stay]
        self._tried.update(left)
        self.left += left

    def set_away(self, seq_id: int, is_away: bool) -> None:
        (self.away.add if is_away else self.away.discard)(seq_id)

    def refuse_away(self) -> None:
        assert self.is_picking
        away = [seq_id for seq_id in self.away if seq_id in self.live and seq_id not in self._tried]
        self._tried.update(away)
        self.refused += away

    def claimant(self, team_ids: Iterable[int], holder: int | None) -> int | None:
        return None

    def settle(
        self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = (), time: StepTime = AS_SERVED
    ) -> None:
        assert time.predicted_us >= time.decode_us > 0
        assert self.is_picking and [s.seq_id for s in served] == self.taken
        self.is_picking = False
        for overhead in overheads:
            self.overhead_us[overhead.team_id] = self.overhead_us.get(overhead.team_id, 0) + overhead.cost_us
        for row in served:
            if row.has_generated:
                self._begun.add(row.seq_id)
            self.charged_us[row.seq_id] = self.charged_us.get(row.seq_id, 0) + row.cost_us

    def protect(self, seq_id: int, num_steps: int) -> None:
        assert not self.is_picking and seq_id in self.live and num_steps >= 0

    def turns(self, seq_ids: Collection[int], slots: int, now_us: int) -> list[Turn]:
        """In order of arrival; each slot's worth of sequences takes a millisecond."""
        order = sorted(self.live)
        return [Turn(seq_id, order.index(seq_id) // slots * 1000) for seq_id in sorted(seq_ids)]

    def over_served(self, team_ids: Iterable[int]) -> list[int]:
        return sorted(team_ids)

    def ahead_of(self, team_ids: Iterable[int], team_id: int) -> set[int]:
        return set()

    def is_band_wide(self) -> bool:
        return self.is_wide

    def num_promotions(self, seq_id: int) -> int:
        assert seq_id in self.live
        return 0

    def leave(self, seq_id: int, now_us: int) -> None:
        assert not self.is_picking
        del self.live[seq_id]
        self.away.discard(seq_id)

    def level(self, seq_id: int) -> int:
        return self.live[seq_id].start_level

    def team_service(self) -> list[TeamService]:
        return []


class Engine:
    """A core over a simulated runner on a virtual clock, with everything it consists of in reach. Without host blocks
    KV stays, unless `settings` say otherwise.
    """

    def __init__(
        self,
        *,
        blocks: int = 24,
        host_blocks: int = 0,
        block_copy_us: float = 0.0,
        policy: Policy | None = None,
        profile: StepProfile = UNIT_PROFILE,
        runner: Runner | None = None,
        clock: VirtualClock | None = None,
        context_len: int = 1024,
        eos: tuple[int, ...] = (),
        teams: tuple[TeamEntry, ...] = (),
        pauses: Pauses | None = None,
        **settings: int | str,
    ) -> None:
        defaults = {"kind": "sim", "block_size": 16, "max_batch_size": 4}
        if not host_blocks:
            defaults["memory_preemption"] = "none"
        self.config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.clock = clock or VirtualClock()
        self.policy = policy or ArrivalOrder()
        self.scheduler = Scheduler(
            self.config,
            self.policy,
            profile,
            blocks,
            eos_token_ids=eos,
            num_host_blocks=host_blocks,
            block_copy_us=block_copy_us,
            pauses=pauses,
        )
        self.runner = runner or SimRunner(profile, self.clock, block_copy_us=block_copy_us)
        model = ModelInfo(
            name="sim", path="", vocab_size=256, context_len=context_len, eos_token_ids=eos, dtype="", device=""
        )
        self.core = EngineCore(self.config, self.scheduler, self.runner, self.clock, model)
        self.core.configure(ConfigureTeams(teams=teams or tuple(team(i) for i in range(4))))

    def run(self, steps_max: int = 10_000) -> list[StepDone]:
        """Step until idle; the books are checked at each step boundary."""
        done: list[StepDone] = []
        while self.core.has_work:
            assert len(done) < steps_max, "no end in sight"
            message = self.core.step()
            self.scheduler.check()
            if message is not None:
                done.append(message)
        return done


def team(team_id: int, *, weight: int = 1, start_level: int = 0) -> TeamEntry:
    """A team on the wire."""
    return TeamEntry(
        team_id=team_id,
        weight=weight,
        start_level=start_level,
        starving_after_us=1_000_000,
        promotion_burst_grants=4,
    )


def submit(
    request_id: str,
    *,
    team_id: int = 0,
    prompt: int = 1,
    output: int = 4,
    max_queue_us: int = 0,
    start_level: int = 0,
    **sampling: object,
) -> Submit:
    """A request of `prompt` tokens that generates exactly `output` unless told otherwise."""
    params = SamplingParams(**{"max_tokens": output, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Submit(
        request_id=request_id,
        team_id=team_id,
        prompt_token_ids=tuple(65 + i % 26 for i in range(prompt)),
        sampling=params,
        max_queue_us=max_queue_us,
        start_level=start_level,
    )
