"""Packs what the policy ranks into steps, and books what came of them; with its part `engine.memory.mover`, the only
writer of sequence statuses.

`schedule` asks the policy for the next sequence, again and again, and fits it into three budgets: slots
(max_batch_size), tokens (max_batch_tokens) and KV blocks. `apply` books the step's result. The scheduler reads no clock
and does no I/O: the same calls give the same plans.

* **Slots and tokens.** A decode row is 1 token. A prefill row is at most one chunk, and ends at an absolute multiple of
  prefill_chunk_tokens, at the prompt's end, or where the step's tokens end: what is left of the budget is always
  used, so a prompt longer than max_batch_tokens advances in every step that picks it, and the next chunk is aligned
  again.
* **Blocks.** Who may start is decided in `engine.memory.starts`. A started sequence takes blocks as it grows; when
  there are none it is refused for this step, and `engine.memory.mover` makes room before the next. Sequences whose KV
  is on the host, or on the way there or back, are refused too.
* **Replay.** A sequence whose KV was dropped starts again like a new one. Its rows feed prompt and output up to where
  it was, sample nothing, and cost it nothing: who displaced it pays. Then it goes on where it stopped.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.memory.manager import MemoryManager, Place
from engine.plan import Row, StepPlan, StepResult
from engine.request import Request, Sequence
from engine.step.pauses import Pauses
from engine.step.step_time import StepTimer
from engine.wire.messages import FinishReason, TokenEvent
from policies.cost import StepProfile
from policies.policy import Policy
from policies.sequences import SequenceTerms, Served, TeamTerms


class ArrivalError(Exception):
    """The policy could not take a sequence in. Nothing has changed: only its request ends."""


_DEVICE = Place.DEVICE  # looked up once
_MAY_RUN = frozenset({Place.DEVICE, Place.NOWHERE, Place.LOST})


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did: an event for each row and each other sequence that was charged, and the sequences it ended."""

    events: tuple[TokenEvent, ...]
    ended: tuple[Sequence, ...]


@dataclass(slots=True)
class _Picked:
    """The rows of a step and, row by row, what `apply` needs to book them."""

    rows: list[Row]
    sequences: list[Sequence]
    works_us: list[int]
    marginals_us: list[float]
    plan: StepPlan | None = None


class Scheduler:
    """Owns every live sequence. Between `schedule` and `apply` a step is open, and neither `add` nor `end` may be
    called."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        profile: StepProfile,
        num_device_blocks: int,
        *,
        eos_token_ids: Iterable[int] = (),
        num_host_blocks: int = 0,
        block_copy_us: float = 0.0,
        pauses: Pauses | None = None,
    ) -> None:
        self.policy = policy
        self._config = config
        self._profile = profile
        self._chunk = config.prefill_chunk_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, Sequence] = {}
        self.memory = MemoryManager(
            config, policy, profile, self._sequences, num_device_blocks, num_host_blocks, block_copy_us
        )
        self.pauses = pauses or Pauses(None, 0)
        self._timer = StepTimer(config, policy, profile)
        self._ran_last: list[Sequence] = []
        self._open: _Picked | None = None
        self._next_seq_id = 0
        self._next_step_id = 0

    @property
    def sequences(self) -> dict[int, Sequence]:
        """The live sequences by id, in order of arrival. Read only."""
        return self._sequences

    @property
    def num_live(self) -> int:
        return len(self._sequences)

    @property
    def has_work(self) -> bool:
        """Sequences are live, or copies of ended ones are still in flight."""
        return bool(self._sequences or self.memory.is_copying)

    @property
    def num_steps(self) -> int:
        """Steps planned so far; the last one's id is one less."""
        return self._next_step_id

    def configure(self, teams: Collection[TeamTerms], now_us: int) -> None:
        """Replace the table of teams."""
        self.policy.configure(teams, now_us)
        self.pauses.configure(teams)
        self.memory.configure(teams)

    def add(self, request: Request, now_us: int) -> Sequence:
        """Take in a request that can run alone on this engine. Raises ArrivalError when the policy cannot."""
        assert self._open is None, "arrivals wait for the end of the step"
        holding = self.memory.hold(request)
        seq_id = self._next_seq_id
        num_prompt = len(request.prompt_token_ids)
        terms = SequenceTerms(
            seq_id=seq_id,
            team_id=request.team_id,
            prompt_len=num_prompt,
            cached_len=0,
            prefill_work_us=self._profile.prefill_work_us(0, num_prompt),
            start_level=request.start_level,
            arrival_us=request.arrival_us,
        )
        try:
            level = self.policy.arrive(terms, now_us)
        except AssertionError:
            raise
        except Exception as error:  # by its contract the policy has changed nothing
            raise ArrivalError(f"{type(error).__name__}: {error}") from error
        self._next_seq_id += 1
        sequence = Sequence(seq_id, request, holding, level)
        sequence.level_path.append(level)
        sequence.last_us = request.arrival_us
        self._sequences[seq_id] = sequence
        self.memory.add(sequence)
        return sequence

    def end(self, seq_id: int, reason: FinishReason, now_us: int) -> Sequence | None:
        """End a sequence from outside, in any state: the next plan lacks it, and its blocks are free at once, but for
        those of a copy in flight, which are free when it is over.

        None when it has ended before.
        """
        assert self._open is None, "a row may not end while its step runs"
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._finish(sequence, reason, now_us)
        return sequence

    def expire(self, now_us: int) -> list[Sequence]:
        """End with "timeout" whatever should have started by now and has not, and with "error" whose copy is lost."""
        expired = self.memory.expired(now_us)
        for sequence in expired:
            self._finish(sequence, "timeout", now_us)
        for sequence in self.memory.overdue(now_us):
            sequence.error = "a copy of KV between device and host was lost"
            self._finish(sequence, "error", now_us)
            expired.append(sequence)
        return expired

    def schedule(self, now_us: int) -> StepPlan | None:
        """Plan the next step; None when nothing is live, or nothing at all can be done. Else `apply` must follow.

        A plan may only copy; one without anything waits for a copy in flight.
        """
        assert self._open is None, "the step before has not been applied"
        memory = self.memory
        if not self._sequences and not memory.is_copying:
            return None
        copies = memory.prepare(self._ran_last, self._next_step_id, now_us)
        for sequence in copies.displaced:
            sequence.is_running = False
            sequence.num_preemptions += 1
        picked = self._pick(now_us)
        if not picked.rows and self._timer.has_left_out:
            # All prompts waited for rows of other teams that then found no blocks.
            self.policy.settle((), now_us)
            self._timer.is_limited = False
            picked = self._pick(now_us)
            self._timer.is_limited = True
        while not (picked.rows or copies.out or copies.back or memory.is_copying):
            self.policy.settle((), now_us)
            forced = memory.force(self._next_step_id, now_us)
            if forced is None:
                return None
            copies = forced
            picked = self._pick(now_us)
        plan = StepPlan(self._next_step_id, tuple(picked.rows), tuple(copies.out), tuple(copies.back))
        self._next_step_id += 1
        picked.plan = plan
        self._open = picked
        return plan

    def _pick(self, now_us: int) -> _Picked:
        """Let the policy pick: its best sequence gets a row, or is refused, which the memory tells the policy."""
        policy, memory, live = self.policy, self.memory, self._sequences
        picked = _Picked([], [], [], [])
        tokens_left, slots_left = self._config.max_batch_tokens, self._config.max_batch_size
        for starving in policy.begin(now_us):
            self.pauses.starve(live[starving.seq_id], starving, now_us)
        timer = self._timer
        timer.begin(self._ran_last, picked.rows, picked.sequences, picked.marginals_us)
        memory.begin()
        is_refused = False
        while slots_left and tokens_left:
            seq_id = policy.best()
            if seq_id is None:
                break
            sequence = live[seq_id]
            start, end = sequence.memory.num_computed, self._row_end(sequence, tokens_left)
            if sequence.memory.place in _MAY_RUN:
                end = timer.row_end(sequence, end)
                if end == start:
                    continue
            is_newcomer = sequence.memory.place is not _DEVICE
            if (is_newcomer and not memory.start(sequence)) or not memory.reach(sequence, end):
                is_refused = True
                continue
            self._take(picked, sequence, end, now_us)
            tokens_left -= end - start
            slots_left -= 1
            if is_newcomer:
                memory.started()
        is_short = is_refused or memory.is_copying or policy.is_band_wide()
        self.pauses.note_memory(is_short=is_short, now_us=now_us)
        timer.end()
        self._change_slots(picked.sequences)
        return picked

    def _take(self, picked: _Picked, sequence: Sequence, end: int, now_us: int) -> None:
        """Give a sequence a row of this step, up to its token `end`."""
        memory = sequence.memory
        if memory.num_computed < memory.replay_to:
            row, work_us, marginal_us = self._replay_row(sequence, end)
        elif sequence.output_token_ids:
            row, work_us, marginal_us = self._decode_row(sequence, end)
        else:
            row, work_us, marginal_us = self._chunk_row(sequence, end)
        self.policy.take(sequence.seq_id, work_us, self._timer.cost_us(marginal_us) if work_us else 0)
        if sequence.first_step_us is None:
            sequence.first_step_us = now_us
        picked.rows.append(row)
        picked.sequences.append(sequence)
        picked.works_us.append(work_us)
        picked.marginals_us.append(marginal_us)
        self._timer.took(row, sequence, marginal_us)

    def _row_end(self, sequence: Sequence, tokens_left: int) -> int:
        """The token up to which a row gets in this step: one further for a decode row, else a multiple of the chunk if
        that can be.
        """
        memory, chunk = sequence.memory, self._chunk
        start, replay_to = memory.num_computed, memory.replay_to
        if sequence.output_token_ids and start >= replay_to:
            return start + 1
        end = min((start // chunk + 1) * chunk, start + tokens_left)
        return min(end, replay_to if start < replay_to else len(sequence.request.prompt_token_ids))

    def _decode_row(self, sequence: Sequence, end: int) -> tuple[Row, int, float]:
        """The newest token, which had no KV yet; its stand-alone work and its marginal cost, in microseconds."""
        memory, output, profile = sequence.memory, sequence.output_token_ids, self._profile
        marginal_us = profile.decode_marginal_us(end)
        work_us = max(1, round(profile.fixed_us + marginal_us))  # profile.decode_work_us, without asking twice
        start, blocks, sampling = memory.num_computed, memory.table.blocks, sequence.request.sampling
        row = Row(sequence.seq_id, True, start, (output[-1],), blocks, True, sampling, len(output))
        return row, work_us, marginal_us

    def _chunk_row(self, sequence: Sequence, end: int) -> tuple[Row, int, float]:
        """A chunk of the prompt, the last of which samples; its stand-alone work and its marginal cost, in
        microseconds.
        """
        start, prompt, profile = sequence.num_computed, sequence.request.prompt_token_ids, self._profile
        row = _prompt_row(sequence, prompt[start:end], samples=end == len(prompt))
        return row, profile.prefill_work_us(start, end - start), profile.prefill_marginal_us(start, end - start)

    def _replay_row(self, sequence: Sequence, end: int) -> tuple[Row, int, float]:
        """Tokens that had KV before it was dropped: no work of the sequence's own, and no new token."""
        start = sequence.num_computed
        tokens = (sequence.request.prompt_token_ids + tuple(sequence.output_token_ids))[start:end]
        return _prompt_row(sequence, tokens, samples=False), 0, self._profile.prefill_marginal_us(start, end - start)

    def apply(self, plan: StepPlan, result: StepResult, now_us: int) -> StepOutcome:
        """Book an executed plan: tokens, charges, levels, copies and endings. Charges, and what is carried for a team
        that has nothing live, sum to the step's measured time. What a failed row alone caused, its sequence pays.
        """
        step = self._open
        assert step is not None and step.plan is plan and result.step_id == plan.step_id, "not the open step"
        self._open = None
        booked = self.memory.book(plan, result, step.sequences, step.marginals_us)
        served: list[Served] = []
        ending: list[tuple[Sequence, FinishReason]] = []
        new_tokens: list[tuple[int, ...]] = []
        failed, token_of, over = result.failed, result.token_ids, self.pauses.over
        for row, sequence, work_us, charge_us in zip(
            plan.rows, step.sequences, step.works_us, booked.charges_us, strict=True
        ):
            seq_id = row.seq_id
            over(sequence, now_us)
            sequence.last_us = now_us
            sequence.work_us += work_us
            tokens: tuple[int, ...] = ()
            reason: FinishReason | None = None
            if seq_id in failed:
                ending.append((sequence, "error"))
                sequence.error = failed[seq_id]
            elif row.samples:
                token_id = token_of[seq_id]
                tokens = (token_id,)
                sequence.output_token_ids.append(token_id)
                if sequence.first_token_us is None:
                    sequence.first_token_us = now_us
                reason = self._finish_reason(sequence, token_id)
                if reason is not None:
                    ending.append((sequence, reason))
            new_tokens.append(tokens)
            served.append(
                Served(seq_id, work_us, charge_us, bool(sequence.output_token_ids), reason is not None, row.is_decode)
            )
        self.policy.settle(
            served, now_us, booked.overheads, self._timer.step_time(plan.rows, step.sequences, step.marginals_us)
        )
        level_of = self.policy.level
        events: list[TokenEvent] = []
        for sequence, tokens in zip(step.sequences, new_tokens, strict=True):
            events.append(TokenEvent(sequence.request.request_id, tokens, sequence.bill.device_us, sequence.level))
            level = level_of(sequence.seq_id)
            if level != sequence.level:
                sequence.level = level
                sequence.level_path.append(level)
        for sequence in booked.charged:
            events.append(TokenEvent(sequence.request.request_id, (), sequence.bill.device_us, sequence.level))
        self.memory.land(result, step.sequences)
        for sequence, reason in ending:
            self._finish(sequence, reason, now_us)
        return StepOutcome(tuple(events), tuple(sequence for sequence, _ in ending))

    def check(self) -> None:
        """Recount everything by owner and assert that the books agree. For tests and idle moments."""
        live = self._sequences.values()
        assert not any(s.is_finished for s in live)
        self.memory.check(live)

    def _change_slots(self, picked: list[Sequence]) -> None:
        """Give the picked their slots; whoever ran in the step before and is not among them has lost its own."""
        gained = [sequence for sequence in picked if not sequence.is_running]
        for sequence in gained:
            sequence.is_running = True
        picked_ids = {sequence.seq_id for sequence in picked}
        lost = [s for s in self._ran_last if s.is_running and s.seq_id not in picked_ids]
        for sequence in lost:
            sequence.is_running = False
            sequence.num_preemptions += 1
        if lost:
            self.memory.bills.note_preemptions(lost, gained)
        self._ran_last = picked

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Whether `token_id`, just appended, is the last. The ending token counts as output and is sent."""
        sampling = sequence.request.sampling
        num_output = len(sequence.output_token_ids)
        if num_output >= sampling.min_tokens and (
            token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in self._eos_token_ids)
        ):
            return "stop"
        return "length" if num_output >= sampling.max_tokens else None

    def _finish(self, sequence: Sequence, reason: FinishReason, now_us: int) -> None:
        self.memory.end(sequence)
        sequence.is_running = False
        sequence.finish_reason = reason
        sequence.ended_us = now_us
        self.pauses.over(sequence, now_us)
        sequence.num_promotions = self.policy.num_promotions(sequence.seq_id)
        del self._sequences[sequence.seq_id]
        self.policy.leave(sequence.seq_id, now_us)


def _prompt_row(sequence: Sequence, token_ids: tuple[int, ...], *, samples: bool) -> Row:
    """A row of prompt, or of tokens that had KV before."""
    memory = sequence.memory
    return Row(
        sequence.seq_id,
        False,
        memory.num_computed,
        token_ids,
        memory.table.blocks,
        samples,
        sequence.request.sampling,
        len(sequence.output_token_ids),
    )
