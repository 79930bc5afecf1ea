"""Clients that react, on the simulated engine: what does each team get within a window of virtual time?

A trace (`engine.sim.simulate`) fixes when each request is sent. A client may instead wait for an answer before it sends
the next request, or leave before the answer has come. `Contest` plays any mixture of such clients against the
production core, and `Tally` holds what one team got. The same clients, settings and profile give the same figures.

A step is booked where it ends: its tokens and its device time count for the window that holds its end.
"""

import heapq
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.clock import MonotonicClock, VirtualClock
from engine.config import EngineConfig
from engine.parts import EngineParts
from engine.plan import StepPlan, StepResult
from engine.process.assembly import assemble
from engine.process.listener import EngineIdentity
from engine.sim.runner import COPY_BYTES_PER_SECOND, SimRunner
from engine.sim.simulate import CONTEXT_LEN, KV_BYTES_PER_TOKEN
from engine.step.core import Runner
from engine.wire.messages import ConfigureTeams, Finished, ModelInfo, SamplingParams, StepDone, Submit, TeamEntry
from policies.cost import StepProfile
from policies.tiers import Tier

SECOND_US = 1_000_000
_VOCAB_SIZE = 128


class NoProgress(Exception):
    """Requests are live, nothing can run, and no client will change that. The message names the time and the teams."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. With `leave_after_us` its client leaves so long after it was sent, answered or not."""

    prompt_tokens: int
    output_tokens: int
    leave_after_us: int | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Sends requests at given times, whatever becomes of them: (microseconds from the start, request), in order of
    time. The sequence may be endless."""

    team: str
    asks: Iterable[tuple[int, Ask]]


@dataclass(frozen=True, slots=True)
class Loop:
    """Keeps `num_streams` requests inside: each stream sends its next request `think_us` after its last one ended."""

    team: str
    ask: Ask
    num_streams: int
    from_us: int = 0
    think_us: int = 0


Client = Open | Loop


def at_once(team: str, num: int, ask: Ask, at_us: int = 0) -> Open:
    """`num` equal requests at one moment."""
    return Open(team, [(at_us, ask)] * num)


def every(team: str, period_us: int, ask: Ask, *, num: int = 1, from_us: int = 0, to_us: int | None = None) -> Open:
    """`num` equal requests each `period_us`, from `from_us` up to before `to_us`, or for ever."""
    return Open(team, _Periodic(period_us, ask, num, from_us, to_us))


@dataclass(frozen=True, slots=True)
class _Periodic:
    """The requests of `every`, from the start at each iteration."""

    period_us: int
    ask: Ask
    num: int
    from_us: int
    to_us: int | None

    def __iter__(self) -> Iterator[tuple[int, Ask]]:
        at_us = self.from_us
        while self.to_us is None or at_us < self.to_us:
            for _ in range(self.num):
                yield at_us, self.ask
            at_us += self.period_us


@dataclass(slots=True)
class Record:
    """One request that was sent, and what became of it."""

    team: str
    ask: Ask
    sent_us: int
    first_token_us: int | None = None
    ended_us: int | None = None
    finished: Finished | None = None
    device_us: int = 0  # charged so far
    prompt_tokens: int = 0  # computed so far, each once
    output_tokens: int = 0
    last_token_us: int = 0
    loop: Loop | None = None  # the client that sends the next when this one has ended

    def note_token(self, now_us: int) -> int | None:
        """A token has come. Returns the time since the one before; None for the first."""
        before_us, self.last_token_us = self.last_token_us, now_us
        self.output_tokens += 1
        if self.first_token_us is not None:
            return now_us - before_us
        self.first_token_us = now_us
        return None

    def note_end(self, finished: Finished, now_us: int) -> None:
        """The request has ended, however it did."""
        self.ended_us, self.finished = now_us, finished

    @property
    def ttft_us(self) -> int | None:
        """From sending to the first token; None when there was none."""
        return None if self.first_token_us is None else self.first_token_us - self.sent_us

    @property
    def jct_us(self) -> int | None:
        """From sending to the end of the whole answer; None when it was not answered to its end."""
        if self.finished is None or self.ended_us is None or self.finished.reason not in ("stop", "length"):
            return None
        return self.ended_us - self.sent_us


@dataclass(slots=True)
class Tally:
    """What one team got within the window."""

    team: str
    device_us: int = 0  # charged
    entitled_us: int = 0  # by the policy's own books, with `served_us` beside it
    served_us: int = 0
    prompt_tokens: int = 0  # computed, each once
    output_tokens: int = 0
    gaps_us: list[int] = field(default_factory=list, repr=False)  # between a request's successive tokens
    token_times_us: list[int] = field(default_factory=list, repr=False)  # when output tokens came
    records: list[Record] = field(default_factory=list, repr=False)  # every request ever sent, in order of sending
    num_refused: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    @property
    def satisfaction(self) -> float:
        """Served over entitled, by the policy's books; 1 when nothing was due."""
        return self.served_us / self.entitled_us if self.entitled_us else 1.0

    def ttfts_us(self, from_us: int = 0, to_us: int | None = None) -> list[int]:
        """Times to the first token of the requests sent in [from_us, to_us), of those that had one, ascending."""
        sent = (r for r in self.records if r.sent_us >= from_us and (to_us is None or r.sent_us < to_us))
        return sorted(ttft for r in sent if (ttft := r.ttft_us) is not None)

    def jcts_us(self) -> list[int]:
        """Times to the whole answer, ascending."""
        return sorted(jct for r in self.records if (jct := r.jct_us) is not None)

    @property
    def num_unanswered(self) -> int:
        """Requests without a first token so far, refused and left ones not counted."""
        return sum(r.first_token_us is None and r.finished is None for r in self.records)


def percentile(ordered: Sequence[int], percent: int) -> int:
    """By nearest rank, of an ascending sequence; 0 when it is empty."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


class RealClock:
    """Real time since the clock was made, in which waiting for a moment sleeps until it comes."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self._start_us = self._clock.now_us()

    def now_us(self) -> int:
        """Microseconds since the start."""
        return self._clock.now_us() - self._start_us

    def advance_to(self, at_us: int) -> None:
        """Sleep until `at_us`."""
        time.sleep(max(0, at_us - self.now_us()) / SECOND_US)


class _CountingRunner:
    """Passes plans on, and counts each request's prompt tokens the first time they are computed."""

    def __init__(self, runner: Runner, records: list[Record]) -> None:
        self._runner = runner
        self._records = records
        self.computed: list[tuple[Record, int]] = []  # in the last step

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan. A request's seed is its place among the records."""
        self.computed.clear()
        for row in plan.rows:
            if not row.is_decode:
                record = self._records[row.sampling.seed]
                done = min(row.start + len(row.token_ids), record.ask.prompt_tokens)
                if done > record.prompt_tokens:
                    self.computed.append((record, done - record.prompt_tokens))
                    record.prompt_tokens = done
        return self._runner.execute(plan)

    def release(self, seq_id: int) -> None:
        """Pass on."""
        self._runner.release(seq_id)


class Contest:
    """Teams and their clients on one simulated engine. `run` once."""

    def __init__(
        self,
        teams: Mapping[str, Tier],
        clients: Iterable[Client],
        *,
        profile: StepProfile,
        config: EngineConfig | None = None,
        context_len: int = CONTEXT_LEN,
        parts: EngineParts | None = None,
    ) -> None:
        """KV pools are what `config` gives them of SmolLM2-135M's. With the `parts` of a real engine the clients play
        in real time on that engine, and its profile takes the place of `profile`. Raises StartError for settings that
        do not fit.
        """
        config = config or EngineConfig(kind="sim")
        self.records: list[Record] = []
        self.clock: VirtualClock | RealClock = VirtualClock() if parts is None else RealClock()
        if parts is None:
            parts = self._simulated(config, profile, context_len)
        self._runner = _CountingRunner(parts.runner, self.records)
        parts = replace(parts, runner=self._runner, clock=self.clock)
        self.core, _, _ = assemble(config, parts, EngineIdentity("sim", 1), lambda line: None)
        self._team_ids = {team: team_id for team_id, team in enumerate(teams)}
        self.core.configure(ConfigureTeams(teams=tuple(_entry(self._team_ids[t], tier) for t, tier in teams.items())))
        self.tallies = {team: Tally(team) for team in teams}
        self.num_steps = 0
        self.longest_step_us = 0
        self._due: list[tuple[int, int, Ask, str, Loop | None]] = []  # heap of what is sent next
        self._more: dict[int, Iterator[tuple[int, Ask]]] = {}  # open clients by their place in the heap
        self._leaving: list[tuple[int, int]] = []  # heap of (when, record)
        self._open_of: dict[str, int] = dict.fromkeys(teams, 0)  # requests inside
        self._place = 0
        self._prompts: dict[int, tuple[int, ...]] = {}
        for client in clients:
            self._start(client)

    def _simulated(self, config: EngineConfig, profile: StepProfile, context_len: int) -> EngineParts:
        """The parts of an engine that computes nothing."""
        assert isinstance(self.clock, VirtualClock)
        block_bytes = config.block_size * KV_BYTES_PER_TOKEN
        block_copy_us = block_bytes * 1e6 / COPY_BYTES_PER_SECOND
        return EngineParts(
            runner=SimRunner(profile, self.clock, block_copy_us=block_copy_us),
            clock=self.clock,
            profile=profile,
            model=ModelInfo(
                name="sim", path="", vocab_size=_VOCAB_SIZE, context_len=context_len, eos_token_ids=(), dtype="",
                device="sim",
            ),
            num_device_blocks=config.kv_memory_bytes // block_bytes,
            num_host_blocks=config.host_kv_memory_bytes // block_bytes,
            block_bytes=block_bytes,
            block_copy_us=block_copy_us,
        )  # fmt: skip

    def run(self, until_us: int | None = None, *, from_us: int = 0, until_ended: str | None = None) -> dict[str, Tally]:
        """Play until `until_us`, until the team `until_ended` has no request inside nor to send, or until nobody has.

        The window is [from_us, until_us). Raises NoProgress.
        """
        core, clock = self.core, self.clock
        begun: dict[str, tuple[int, int]] | None = None
        while until_us is None or clock.now_us() < until_us:
            now_us = clock.now_us()
            if begun is None and now_us >= from_us:
                begun = self._books()
            self._send_due(now_us)
            if until_ended is not None and self._has_ended(until_ended):
                break
            done = core.step() if core.has_work else None
            if done is None:
                if core.has_work and not core.scheduler.has_work:
                    continue  # a client left what had ended already
                if not self._skip_idle(until_us):
                    break
                continue
            self._book(done, from_us, until_us)
        for team, (served_us, entitled_us) in self._books().items():
            tally, (served_before_us, entitled_before_us) = self.tallies[team], (begun or {}).get(team, (0, 0))
            tally.served_us, tally.entitled_us = served_us - served_before_us, entitled_us - entitled_before_us
        return self.tallies

    def _start(self, client: Client) -> None:
        if isinstance(client, Loop):
            for _ in range(client.num_streams):
                self._push(client.from_us, client.ask, client.team, client)
        else:
            self._push_next(client.team, iter(client.asks))

    def _push(self, at_us: int, ask: Ask, team: str, loop: Loop | None = None) -> int:
        self._place += 1
        heapq.heappush(self._due, (at_us, self._place, ask, team, loop))
        return self._place

    def _push_next(self, team: str, asks: Iterator[tuple[int, Ask]]) -> None:
        following = next(asks, None)
        if following is not None:
            self._more[self._push(*following, team)] = asks

    def _send_due(self, now_us: int) -> None:
        """Send what is due and let leave whose time is up, in order of time for each."""
        due, leaving = self._due, self._leaving
        while due and due[0][0] <= now_us:
            at_us, place, ask, team, loop = heapq.heappop(due)
            self._send(at_us, ask, team, loop)
            asks = self._more.pop(place, None)
            if asks is not None:
                self._push_next(team, asks)
        while leaving and leaving[0][0] <= now_us:
            _, index = heapq.heappop(leaving)
            if self.records[index].finished is None:
                self.core.abort(str(index))

    def _send(self, at_us: int, ask: Ask, team: str, loop: Loop | None) -> None:
        index = len(self.records)
        num = ask.prompt_tokens
        prompt = self._prompts.get(num) or self._prompts.setdefault(num, (0,) * num)
        refused = self.core.add(
            Submit(
                request_id=str(index),
                team_id=self._team_ids[team],
                prompt_token_ids=prompt,
                sampling=SamplingParams(seed=index, max_tokens=ask.output_tokens, ignore_eos=True),
            )
        )
        tally = self.tallies[team]
        if refused is not None:
            tally.num_refused += 1
            return
        record = Record(team, ask, at_us, loop=loop)
        self.records.append(record)
        tally.records.append(record)
        self._open_of[team] += 1
        if ask.leave_after_us is not None:
            heapq.heappush(self._leaving, (at_us + ask.leave_after_us, index))

    def _has_ended(self, team: str) -> bool:
        return not self._open_of[team] and not any(entry[3] == team for entry in self._due)

    def _skip_idle(self, until_us: int | None) -> bool:
        """Move the clock to the next moment at which a client does something; False when there is none."""
        moments = [heap[0][0] for heap in (self._due, self._leaving if self.core.has_work else []) if heap]
        if not moments:
            if self.core.has_work:
                stuck = sorted(team for team, num in self._open_of.items() if num)
                raise NoProgress(f"at {self.clock.now_us()} us nothing can run for {', '.join(stuck)}")
            return False
        at_us = min(moments)
        self.clock.advance_to(at_us if until_us is None else min(at_us, until_us))
        return True

    def _book(self, done: StepDone, from_us: int, until_us: int | None) -> None:
        now_us, records, tallies = self.clock.now_us(), self.records, self.tallies
        self.num_steps += 1
        self.longest_step_us = max(self.longest_step_us, done.duration_us)
        is_inside = now_us >= from_us and (until_us is None or now_us < until_us)
        for event in done.tokens:
            record = records[int(event.request_id)]
            tally = tallies[record.team]
            if is_inside:
                tally.device_us += event.device_us - record.device_us
            record.device_us = event.device_us
            if event.token_ids:
                gap_us = record.note_token(now_us)
                if is_inside:
                    tally.output_tokens += 1
                    tally.token_times_us.append(now_us)
                    if gap_us is not None:
                        tally.gaps_us.append(gap_us)
        if is_inside:
            for record, num_tokens in self._runner.computed:
                tallies[record.team].prompt_tokens += num_tokens
        for finished in done.finished:
            record = records[int(finished.request_id)]
            record.note_end(finished, now_us)
            self._open_of[record.team] -= 1
            loop = record.loop
            if loop is not None:
                self._push(now_us + loop.think_us, loop.ask, loop.team, loop)
        self._runner.computed.clear()

    def _books(self) -> dict[str, tuple[int, int]]:
        """Served and entitled device time of each team so far, as the policy counts them."""
        names = list(self.tallies)
        return {names[s.team_id]: (s.served_us, s.entitled_us) for s in self.core.scheduler.policy.team_service()}


def _entry(team_id: int, tier: Tier) -> TeamEntry:
    terms = tier.terms(team_id)
    return TeamEntry(
        team_id=team_id,
        weight=terms.weight,
        start_level=terms.start_level,
        starving_after_us=terms.starving_after_us,
        promotion_burst_grants=terms.promotion_burst_grants,
    )
