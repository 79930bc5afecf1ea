"""Packs what the policy ranks into steps, and books what came of them; the only writer of sequence statuses.

`schedule` asks the policy for the next sequence, again and again, and fits it into three budgets: slots
(max_batch_size), tokens (max_batch_tokens) and KV blocks. `apply` books the step's result. The scheduler reads no clock
and does no I/O: the same calls give the same plans.

* **Slots and tokens.** A decode row is 1 token. A prefill row is at most one chunk, and ends at an absolute multiple of
  prefill_chunk_tokens, at the prompt's end, or where the step's tokens end: what is left of the budget is always
  used, so a prompt longer than max_batch_tokens advances in every step that picks it, and the next chunk is aligned
  again.
* **Blocks.** Without memory preemption nothing can be taken back from a started sequence, so one starts only if the
  blocks of its prompt and clamped max tokens fit beside the same sum over all started ones. Growth then never fails.
* **Reservation** (docs/scheduling.md). The first sequence refused more than 16 times holds the one reservation until
  it fits; others start only beside it. One holder cannot deadlock, and a large head cannot starve behind small ones.
  It is the policy's `claimant` whose sequences may hold it, and it is taken back from a team that is no longer that.
* **Fits again.** When room has grown, the policy hears of each team's oldest refused sequence that would fit now. A
  policy that thought the team unable to run would otherwise never try it again behind others of better levels.
* **Closed steps.** When not even the smallest new sequence fits, all are refused at once, so a full pool costs no more
  than an empty queue. Such a step counts as a refusal for each; the reservation then goes to the oldest.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from engine.blocks import BlockPool, BlockTable, blocks_for
from engine.config import EngineConfig
from engine.messages import FinishReason, TokenEvent
from engine.plan import Row, StepPlan, StepResult
from engine.request import Request, Sequence, Status
from policies.cost import StepProfile, split_step
from policies.policy import Policy
from policies.sequences import SequenceTerms, Served

REFUSALS_BEFORE_RESERVATION = 16


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did to its sequences: one event for each row, and the sequences that ended in it."""

    events: tuple[TokenEvent, ...]
    ended: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class _Picked:
    """A planned step and, row by row, what `apply` needs to book it."""

    plan: StepPlan
    sequences: list[Sequence]
    works_us: list[int]
    marginals_us: list[float]


class Scheduler:
    """Owns every live sequence, the block pool and the reservation. Between `schedule` and `apply` a step is open, and
    neither `add` nor `end` may be called."""

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
    ) -> None:
        self.policy = policy
        self.pool = BlockPool(num_device_blocks)
        self._config = config
        self._profile = profile
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: dict[int, Sequence] = {}  # without a first step, in order of arrival
        self._waiting_of: dict[int, dict[int, Sequence]] = {}  # the same by team
        self._claimant: int | None = None  # of this step, once it is known; None is any team
        self._is_claimant_known = False
        self._has_room_grown = False  # since it was last said who fits again
        self._needs: list[tuple[int, int]] = []  # heap of (num_blocks_max, seq_id), also of sequences long started
        self._num_closed = 0  # steps in which nothing new fitted
        self._ran_last: list[Sequence] = []
        self._num_committed = 0  # blocks that started sequences hold or may still need
        self._holder: Sequence | None = None  # of the reservation
        self._deadlines: list[tuple[int, int]] = []  # heap of (start_by_us, seq_id), also of sequences long started
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
    def num_steps(self) -> int:
        """Steps planned so far; the last one's id is one less."""
        return self._next_step_id

    @property
    def num_waiting(self) -> int:
        """Sequences without a first step."""
        return len(self._waiting)

    @property
    def reserved_for(self) -> int | None:
        """The sequence that holds the reservation."""
        return self._holder.seq_id if self._holder is not None else None

    def add(self, request: Request, now_us: int) -> Sequence:
        """Take in a request that can run alone on this engine. Raises KeyError for an unknown team."""
        assert self._open is None, "arrivals wait for the end of the step"
        block_size = self._config.block_size
        num_blocks_max = blocks_for(request.total_tokens_max, block_size)
        assert num_blocks_max <= self.pool.num_blocks, "impossible requests are refused before they get here"
        seq_id = self._next_seq_id
        num_prompt = len(request.prompt_token_ids)
        level = self.policy.arrive(
            SequenceTerms(
                seq_id=seq_id,
                team_id=request.team_id,
                prompt_len=num_prompt,
                cached_len=0,
                prefill_work_us=self._profile.prefill_work_us(0, num_prompt),
                start_level=request.start_level,
                arrival_us=request.arrival_us,
            ),
            now_us,
        )
        self._next_seq_id += 1
        sequence = Sequence(seq_id, request, BlockTable(self.pool, block_size), num_blocks_max, level)
        sequence.level_path.append(level)
        self._sequences[seq_id] = sequence
        sequence.num_closed_before = self._num_closed
        self._waiting[seq_id] = sequence
        self._waiting_of.setdefault(request.team_id, {})[seq_id] = sequence
        heapq.heappush(self._needs, (num_blocks_max, seq_id))
        if request.start_by_us is not None:
            heapq.heappush(self._deadlines, (request.start_by_us, seq_id))
        return sequence

    def end(self, seq_id: int, reason: FinishReason, now_us: int) -> Sequence | None:
        """End a sequence from outside, in any state: its blocks are free at once, the next plan lacks it.

        None when it has ended before.
        """
        assert self._open is None, "a row may not end while its step runs"
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._finish(sequence, reason, now_us)
        return sequence

    def expire(self, now_us: int) -> list[Sequence]:
        """End with "timeout" whatever should have started by now and has not."""
        expired: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, seq_id = heapq.heappop(self._deadlines)
            sequence = self._waiting.get(seq_id)
            if sequence is not None:
                self._finish(sequence, "timeout", now_us)
                expired.append(sequence)
        if len(self._deadlines) > 2 * self.num_waiting + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._waiting]
            heapq.heapify(self._deadlines)
        return expired

    def schedule(self, now_us: int) -> StepPlan | None:
        """Plan the next step, or None when nothing is live. `apply` must follow before the next call."""
        assert self._open is None, "the step before has not been applied"
        if not self._sequences:
            return None
        policy, profile = self.policy, self._profile
        best, take = policy.best, policy.take
        tokens_left = self._config.max_batch_tokens
        slots_left = self._config.max_batch_size
        rows: list[Row] = []
        picked: list[Sequence] = []
        works_us: list[int] = []
        marginals_us: list[float] = []

        if self._has_room_grown:
            self._say_who_fits_again()
        policy.begin(now_us)
        refused: list[Sequence] = []
        self._is_claimant_known = False
        if self._holder is not None and not self._may_hold(self._holder):
            self._holder = None
            self._has_room_grown = True
        is_closed = self._close(refused)
        while slots_left and tokens_left:
            seq_id = best()
            if seq_id is None:
                break
            sequence = self._sequences[seq_id]
            is_new = sequence.status is Status.WAITING
            if is_new and not self._try_start(sequence, now_us):
                policy.refuse(seq_id)
                refused.append(sequence)
                continue
            request, output = sequence.request, sequence.output_token_ids
            start = sequence.num_computed
            is_decode = bool(output)
            if is_decode:
                token_ids: tuple[int, ...] = (output[-1],)
                end = start + 1
                samples = True
                work_us = profile.decode_work_us(end)
                marginals_us.append(profile.decode_marginal_us(end))
            else:
                end = self._chunk_end(start, len(request.prompt_token_ids), tokens_left)
                token_ids = request.prompt_token_ids[start:end]
                samples = end == len(request.prompt_token_ids)
                work_us = profile.prefill_work_us(start, end - start)
                marginals_us.append(profile.prefill_marginal_us(start, end - start))
            take(seq_id, work_us)
            sequence.table.grow_to(end)
            works_us.append(work_us)
            picked.append(sequence)
            rows.append(
                Row(seq_id, is_decode, start, token_ids, sequence.table.blocks, samples, request.sampling, len(output))
            )
            tokens_left -= end - start
            slots_left -= 1
            if is_new and not is_closed:
                is_closed = self._close(refused)

        self._change_slots(picked)
        if not rows:
            policy.settle((), now_us)
            return None
        plan = StepPlan(self._next_step_id, tuple(rows))
        self._next_step_id += 1
        self._open = _Picked(plan, picked, works_us, marginals_us)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now_us: int) -> StepOutcome:
        """Book an executed plan: tokens, charges, levels and endings. Charges sum to the step's measured time."""
        step = self._open
        assert step is not None and step.plan is plan and result.step_id == plan.step_id, "not the open step"
        self._open = None
        charges_us = split_step(result.duration_us, step.marginals_us, self._profile.fixed_us)
        served: list[Served] = []
        ending: list[tuple[Sequence, FinishReason]] = []
        new_tokens: list[tuple[int, ...]] = []
        for row, sequence, work_us, charge_us in zip(plan.rows, step.sequences, step.works_us, charges_us, strict=True):
            sequence.num_computed = row.start + len(row.token_ids)
            sequence.device_us += charge_us
            tokens: tuple[int, ...] = ()
            reason: FinishReason | None = None
            if row.seq_id in result.failed:
                ending.append((sequence, "error"))
                sequence.error = result.failed[row.seq_id]
            elif row.samples:
                token_id = result.token_ids[row.seq_id]
                tokens = (token_id,)
                sequence.output_token_ids.append(token_id)
                if sequence.first_token_us is None:
                    sequence.first_token_us = now_us
                reason = self._finish_reason(sequence, token_id)
                if reason is not None:
                    ending.append((sequence, reason))
            new_tokens.append(tokens)
            served.append(Served(row.seq_id, work_us, charge_us, bool(sequence.output_token_ids), reason is not None))

        self.policy.settle(served, now_us)
        level_of = self.policy.level
        events: list[TokenEvent] = []
        for sequence, tokens in zip(step.sequences, new_tokens, strict=True):
            events.append(TokenEvent(sequence.request.request_id, tokens, sequence.device_us, sequence.level))
            level = level_of(sequence.seq_id)
            if level != sequence.level:
                sequence.level = level
                sequence.level_path.append(level)
        for sequence, reason in ending:
            self._finish(sequence, reason, now_us)
        return StepOutcome(tuple(events), tuple(sequence for sequence, _ in ending))

    def check(self) -> None:
        """Recount everything by owner and assert that the books agree. For tests and idle moments."""
        owned = [block for s in self._sequences.values() for block in s.table.blocks]
        assert len(owned) == len(set(owned)) == self.pool.num_owned, "each owned block has one owner"
        assert self.pool.num_free + self.pool.num_owned == self.pool.num_blocks, "free + owned = total"
        started = [s for s in self._sequences.values() if s.status is not Status.WAITING]
        assert self._num_committed == sum(s.num_blocks_max for s in started) <= self.pool.num_blocks
        assert self.num_waiting == len(self._sequences) - len(started)
        assert self.num_waiting == sum(len(waiting) for waiting in self._waiting_of.values())
        assert all(len(s.table.blocks) <= s.num_blocks_max for s in started)
        assert not any(s.table.blocks for s in self._sequences.values() if s.status is Status.WAITING)
        assert not any(s.is_finished for s in self._sequences.values())

    def _chunk_end(self, start: int, num_prompt: int, tokens_left: int) -> int:
        chunk = self._config.prefill_chunk_tokens
        return min(num_prompt, (start // chunk + 1) * chunk, start + tokens_left)

    def _close(self, refused: list[Sequence]) -> bool:
        """Refuse all new sequences at once when not even the smallest fits. This step has `refused` some before."""
        needs = self._needs
        while needs and needs[0][1] not in self._waiting:
            heapq.heappop(needs)
        room = self.pool.num_blocks - self._num_committed
        if not needs or needs[0][0] <= room - (self._holder.num_blocks_max if self._holder is not None else 0):
            return False
        if self._holder is not None and self._holder.num_blocks_max <= room:
            return False
        self.policy.refuse_new()
        self._num_closed += 1
        for sequence in refused:
            sequence.num_refusals -= 1  # a step counts once
        if self._holder is None:
            claimant = self._find_claimant()
            waiting = self._waiting if claimant is None else self._waiting_of.get(claimant)
            if waiting:
                self._reserve_for(next(iter(waiting.values())))
        return True

    def _find_claimant(self) -> int | None:
        """Whose sequences may hold the reservation in this step; asked only when somebody might."""
        if not self._is_claimant_known:
            self._is_claimant_known = True
            holding = self._holder.request.team_id if self._holder is not None else None
            self._claimant = self.policy.claimant(self._waiting_of, holding)
        return self._claimant

    def _may_hold(self, sequence: Sequence) -> bool:
        return self._find_claimant() in (None, sequence.request.team_id)

    def _reserve_for(self, sequence: Sequence) -> None:
        """Give the free reservation to a sequence that was refused often enough, if its team may hold it."""
        num_refusals = sequence.num_refusals + self._num_closed - sequence.num_closed_before
        if num_refusals > REFUSALS_BEFORE_RESERVATION and self._may_hold(sequence):
            self._holder = sequence
            self._has_room_grown = True  # for the holder

    def _say_who_fits_again(self) -> None:
        self._has_room_grown = False
        for waiting in self._waiting_of.values():
            oldest = next(iter(waiting.values()))
            if (oldest.num_refusals or self._num_closed > oldest.num_closed_before) and self._fits(oldest):
                self.policy.fits_again(oldest.seq_id)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence's blocks fit beside all started ones and the reservation."""
        holder = self._holder
        num_reserved = holder.num_blocks_max if holder is not None and holder is not sequence else 0
        return self._num_committed + num_reserved + sequence.num_blocks_max <= self.pool.num_blocks

    def _try_start(self, sequence: Sequence, now_us: int) -> bool:
        """Let a waiting sequence start if it fits."""
        holder = self._holder
        if not self._fits(sequence):
            sequence.num_refusals += 1
            if holder is None:
                self._reserve_for(sequence)
            return False
        if holder is sequence:
            self._holder = None
        self._num_committed += sequence.num_blocks_max
        self._forget_waiting(sequence)
        sequence.first_step_us = now_us
        sequence.move_to(Status.RUNNING)
        return True

    def _forget_waiting(self, sequence: Sequence) -> None:
        del self._waiting[sequence.seq_id]
        team_id = sequence.request.team_id
        waiting = self._waiting_of[team_id]
        del waiting[sequence.seq_id]
        if not waiting:
            del self._waiting_of[team_id]

    def _change_slots(self, picked: list[Sequence]) -> None:
        """Give the picked their slots; whoever ran in the step before and is not among them has lost its own."""
        for sequence in picked:
            if sequence.status is Status.PAUSED:
                sequence.move_to(Status.RUNNING)
        kept = {sequence.seq_id for sequence in picked}
        for sequence in self._ran_last:
            if sequence.seq_id not in kept and not sequence.is_finished:
                sequence.move_to(Status.PAUSED)
                sequence.num_preemptions += 1
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
        if sequence.status is Status.WAITING:
            self._forget_waiting(sequence)
        else:
            self._num_committed -= sequence.num_blocks_max
        self._has_room_grown = True
        if self._holder is sequence:
            self._holder = None
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        sequence.ended_us = now_us
        sequence.table.release()
        del self._sequences[sequence.seq_id]
        self.policy.leave(sequence.seq_id, now_us)
