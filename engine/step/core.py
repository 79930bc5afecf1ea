"""The engine without its socket: requests go in, one message per step comes out.

`EngineCore` owns the inbox and the request ids. Everything that arrives while a step runs waits in the inbox and takes
effect at the next step boundary, in order; so a plan made after an abort was handed in never contains the aborted
sequence. Every accepted request ends exactly once, in the `finished` of one StepDone. A request whose arrival raises
ends alone, with an error; an exception anywhere else between two steps, and a failed assertion everywhere, goes on to
end the engine, for then the books may be half written.

The queue is bounded, and so is one team's part of it: when `max_queued_requests` wait, a request is still taken from a
team that has fewer inside than that number divided by the teams that have any. So a flood fills the queue for the team
that sends it, and for nobody else. With n teams at most (1 + 1/2 + ... + 1/n) times the number ever wait.
"""

import logging
from collections import deque
from typing import Protocol

from engine.clock import Clock
from engine.config import EngineConfig
from engine.plan import StepPlan, StepResult
from engine.request import Request, Sequence
from engine.sampling import foreign_id, sampling_fault
from engine.step.log import StepLog
from engine.step.scheduler import ArrivalError, Scheduler
from engine.wire.messages import (
    Abort,
    ConfigureTeams,
    Finished,
    ModelInfo,
    Refused,
    SamplingParams,
    StepDone,
    Submit,
    TokenEvent,
)
from policies.sequences import TeamTerms

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes plans on a device, or pretends to."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end. What goes wrong with single rows is in the result's `failed`."""

    def release(self, seq_id: int) -> None:
        """`seq_id` has ended; forget what is kept for it. Also for one that never ran."""


class EngineCore:
    """Owns the inbox, the request ids and the loop of one step. One thread; never blocks but in `Runner.execute`."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        model: ModelInfo,
        step_log: StepLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._config = config
        self._runner = runner
        self._clock = clock
        self._model = model
        self._step_log = step_log
        self._inbox: deque[Request | Abort | ConfigureTeams] = deque()
        self._num_inbox_requests = 0
        self._team_ids: frozenset[int] = frozenset()
        self._request_ids: set[str] = set()  # accepted and not yet ended
        self._num_of_team: dict[int, int] = {}  # the same by team, of those that have any
        self._seq_ids: dict[str, int] = {}  # request_id -> seq_id of those the scheduler has
        self._ended: list[Sequence] = []  # since the last StepDone
        self._unborn: list[Finished] = []  # likewise: ended before there was a sequence

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._inbox or self._ended or self._unborn or self.scheduler.has_work)

    @property
    def request_ids(self) -> frozenset[str]:
        """Requests accepted and not yet ended."""
        return frozenset(self._request_ids)

    def configure(self, message: ConfigureTeams) -> None:
        """Replace the table of teams at the next step boundary."""
        self._team_ids = frozenset(team.team_id for team in message.teams)
        self._inbox.append(message)

    def add(self, message: Submit) -> Refused | None:
        """Take a request in, or say why not; a refused request leaves no trace."""
        try:
            refusal = self._why_refused(message)
            request = self._request(message) if refusal is None else None
        except AssertionError:
            raise
        except Exception as error:  # nothing is written yet, so it is this message's fault alone
            logger.exception("request %s could not be looked at", message.request_id)
            return Refused(request_id=message.request_id, code="engine_error", message=type(error).__name__)
        if request is None:
            assert refusal is not None
            code, text = refusal
            return Refused(request_id=message.request_id, code=code, message=text)
        self._request_ids.add(message.request_id)
        self._num_inbox_requests += 1
        self._num_of_team[message.team_id] = self._num_of_team.get(message.team_id, 0) + 1
        self._inbox.append(request)
        return None

    def _request(self, message: Submit) -> Request:
        now_us = self._clock.now_us()
        return Request(
            request_id=message.request_id,
            team_id=message.team_id,
            start_level=message.start_level,
            prompt_token_ids=message.prompt_token_ids,
            sampling=self._clamped(message.sampling, len(message.prompt_token_ids)),
            arrival_us=now_us,
            start_by_us=now_us + message.max_queue_us if message.max_queue_us > 0 else None,
        )

    def abort(self, request_id: str) -> None:
        """End a request at the next step boundary, in whatever state it is. Unknown ids are ignored."""
        self._inbox.append(Abort(request_id=request_id))

    def step(self) -> StepDone | None:
        """Drain the inbox, run one step, and tell everything that came of it; None when there was nothing to do."""
        now_us = began_us = self._clock.now_us()
        self._drain_inbox(now_us)
        for sequence in self.scheduler.expire(now_us):
            self._note_ended(sequence)
        plan = self.scheduler.schedule(now_us)
        duration_us = 0
        events: tuple[TokenEvent, ...] = ()
        result: StepResult | None = None
        if plan is not None:
            result = self._runner.execute(plan)
            now_us = self._clock.now_us()
            outcome = self.scheduler.apply(plan, result, now_us)
            duration_us, events = result.duration_us, outcome.events
            for sequence in outcome.ended:
                self._note_ended(sequence)
        ended, self._ended = self._ended, []
        unborn, self._unborn = self._unborn, []
        if self._step_log is not None:
            self._step_log.write(began_us, plan, result, ended, self.scheduler)
        if plan is None and not (ended or unborn):
            return None
        num_running = len(plan.rows) if plan is not None else 0
        return StepDone(
            step_id=max(0, self.scheduler.num_steps - 1) if plan is None else plan.step_id,
            duration_us=duration_us,
            tokens=events,
            finished=(*unborn, *(_finished(sequence) for sequence in ended)),
            num_running=num_running,
            num_waiting=max(0, self.scheduler.num_live - num_running),
            num_free_blocks=self.scheduler.memory.device.num_free,
            num_free_host_blocks=self.scheduler.memory.host.num_free,
            num_swapped=self.scheduler.memory.num_away,
            num_dropped=self.scheduler.memory.num_dropped,
        )

    def _drain_inbox(self, now_us: int) -> None:
        inbox = self._inbox
        while inbox:
            message = inbox.popleft()
            if self._step_log is not None:
                self._step_log.took(message)
            if isinstance(message, Request):
                self._num_inbox_requests -= 1
                try:
                    sequence = self.scheduler.add(message, now_us)
                except ArrivalError as error:
                    self._note_unborn(message, error, now_us)
                    continue
                self._seq_ids[message.request_id] = sequence.seq_id
            elif isinstance(message, Abort):
                seq_id = self._seq_ids.get(message.request_id)
                ended = self.scheduler.end(seq_id, "abort", now_us) if seq_id is not None else None
                if ended is not None:
                    self._note_ended(ended)
            else:
                terms = [
                    TeamTerms(
                        team_id=team.team_id,
                        weight=team.weight,
                        start_level=team.start_level,
                        starving_after_us=team.starving_after_us,
                        promotion_burst_grants=team.promotion_burst_grants,
                    )
                    for team in message.teams
                ]
                self.scheduler.configure(terms, now_us)

    def _note_unborn(self, request: Request, error: ArrivalError, now_us: int) -> None:
        logger.error("request %s fails at its arrival", request.request_id, exc_info=error)
        self._forget(request)
        waited_us = now_us - request.arrival_us
        self._unborn.append(
            Finished(
                request_id=request.request_id,
                reason="error",
                message=str(error),
                prompt_tokens=len(request.prompt_token_ids),
                queued_us=waited_us,
                total_us=waited_us,
            )
        )

    def _forget(self, request: Request) -> None:
        self._request_ids.remove(request.request_id)
        self._num_of_team[request.team_id] -= 1
        if not self._num_of_team[request.team_id]:
            del self._num_of_team[request.team_id]

    def _note_ended(self, sequence: Sequence) -> None:
        self._forget(sequence.request)
        del self._seq_ids[sequence.request.request_id]
        self._runner.release(sequence.seq_id)
        self._ended.append(sequence)

    def _why_refused(self, message: Submit) -> tuple[str, str] | None:
        """An error code and a sentence, or None for a request that can run."""
        if message.request_id in self._request_ids:
            return "invalid_request", f"request id {message.request_id!r} is in use"
        if message.team_id not in self._team_ids:
            return "invalid_request", f"team {message.team_id} is not configured"
        most = self._config.max_queued_requests
        if self.scheduler.memory.num_waiting + self._num_inbox_requests >= most:
            others = self._num_of_team.keys() - {message.team_id}
            if not others or self._num_of_team.get(message.team_id, 0) >= most // (len(others) + 1):
                return "queue_full", f"{most} requests are queued already"
        prompt = message.prompt_token_ids
        if not prompt:
            return "invalid_request", "the prompt has no tokens"
        if foreign_id(prompt, self._model.vocab_size) is not None:
            return "invalid_request", f"token ids must lie in [0, {self._model.vocab_size})"
        wrong = sampling_fault(message.sampling, self._model.vocab_size)
        if wrong is not None:
            return "invalid_request", wrong
        if len(prompt) + 1 > self._tokens_max:
            said = f"the prompt has {len(prompt)} tokens; with one token of output at most {self._tokens_max} fit"
            if self.scheduler.memory.tokens_max < self._model.context_len:
                said += (
                    f" into the KV memory; the model's context has {self._model.context_len}. "
                    "An operator can raise --kv-memory"
                )
            else:
                said += " into the model's context; send a shorter prompt"
            return "context_length_exceeded", said
        return None

    @property
    def _tokens_max(self) -> int:
        """Prompt and output of one request, at most: what context and an empty pool hold."""
        return min(self._model.context_len, self.scheduler.memory.tokens_max)

    def _clamped(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        room = self._tokens_max - num_prompt
        if sampling.max_tokens <= room:
            return sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            max_tokens=room,
            min_tokens=min(sampling.min_tokens, room),
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=sampling.stop_token_ids,
        )


def _finished(sequence: Sequence) -> Finished:
    """The message that ends a request."""
    request, ended_us = sequence.request, sequence.ended_us
    assert sequence.finish_reason is not None and ended_us is not None
    started_us = ended_us if sequence.first_step_us is None else sequence.first_step_us
    first_token_us = 0 if sequence.first_token_us is None else sequence.first_token_us - request.arrival_us
    return Finished(
        request_id=request.request_id,
        reason=sequence.finish_reason,
        message=sequence.error,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=len(sequence.output_token_ids),
        device_us=sequence.bill.device_us,
        queued_us=started_us - request.arrival_us,
        first_token_us=first_token_us,
        total_us=ended_us - request.arrival_us,
        level_path=tuple(sequence.level_path),
        num_preemptions=sequence.num_preemptions,
        num_swaps=sequence.memory.num_swaps,
        num_recomputes=sequence.memory.num_recomputes,
        num_promotions=sequence.num_promotions,
        work_us=sequence.work_us,
        overhead_us=sequence.bill.overhead_us,
        longest_pause_us=sequence.pause.longest_us,
        pause_bound_us=sequence.pause.bound_us,
        pause_of_bound=sequence.pause.of_bound,
    )
