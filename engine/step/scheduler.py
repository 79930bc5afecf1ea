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

from engine.blocks import BlockTable, blocks_for
from engine.config import EngineConfig
from engine.memory.billing import Bills
from engine.memory.mover import Swapping
from engine.memory.moves import Copies
from engine.memory.pools import KVMemory
from engine.memory.starts import Entry
from engine.plan import Row, StepPlan, StepResult
from engine.request import Request, Sequence, Status
from engine.step.pauses import Promises
from engine.wire.messages import FinishReason, TokenEvent
from policies.cost import StepProfile, split_step
from policies.policy import Policy
from policies.sequences import SequenceTerms, Served, TeamTerms

_RUNNING, _PAUSED, _WAITING, _DROPPED = Status.RUNNING, Status.PAUSED, Status.WAITING, Status.DROPPED


class ArrivalError(Exception):
    """The policy could not take a sequence in. Nothing has changed: only its request ends."""


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
    """Owns every live sequence and the KV memory. Between `schedule` and `apply` a step is open, and neither `add` nor
    `end` may be called."""

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
        promises: Promises | None = None,
    ) -> None:
        """Without a host pool KV can be taken back only in the mode "recompute"; else it is as in the mode "none"."""
        self.policy = policy
        self._config = config
        self._profile = profile
        self._eos_token_ids = frozenset(eos_token_ids)
        mode = config.memory_preemption
        self.memory_preemption = mode if num_host_blocks > 0 or mode == "recompute" else "none"  # what is in force
        can_take_back = self.memory_preemption != "none"
        num_host_blocks = num_host_blocks if can_take_back and mode != "recompute" else 0
        self.memory = KVMemory(num_device_blocks, num_host_blocks)
        self.pool = self.memory.device
        self.bills = Bills()
        self.promises = promises or Promises(None, 0)
        self._sequences: dict[int, Sequence] = {}
        self._entry = Entry(num_device_blocks, num_host_blocks, config.block_size, can_take_back=can_take_back)
        self._swaps: Swapping | None = None
        if can_take_back:
            self._swaps = Swapping(
                config, profile, self.memory, self._entry, self.bills, self._sequences, block_copy_us
            )
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

    @property
    def num_waiting(self) -> int:
        """Sequences without a first step."""
        return len(self._entry.waiting)

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV is on the host, or on the way there or back."""
        return len(self._swaps.away) if self._swaps is not None else 0

    @property
    def num_dropped(self) -> int:
        """Sequences whose KV is gone and will be computed again."""
        return self._swaps.num_dropped if self._swaps is not None else 0

    @property
    def tokens_max(self) -> int:
        """Tokens that the device's blocks hold, when none is taken."""
        return self._entry.device_blocks * self._config.block_size

    def take_shortage(self) -> bool:
        """Whether anybody was refused for blocks since the last call, or the lags had not come back from that."""
        is_wide = self.policy.is_band_wide()
        was_short, self._entry.is_short = self._entry.is_short or is_wide, is_wide
        return was_short

    @property
    def reserved_for(self) -> int | None:
        """The sequence that holds the reservation."""
        return self._entry.holder.seq_id if self._entry.holder is not None else None

    def configure(self, teams: Collection[TeamTerms], now_us: int) -> None:
        """Replace the table of teams."""
        self.policy.configure(teams, now_us)
        self.promises.configure(teams)
        if self._swaps is not None:
            self._swaps.weights = {terms.team_id: terms.weight for terms in teams}

    def add(self, request: Request, now_us: int) -> Sequence:
        """Take in a request that can run alone on this engine. Raises ArrivalError when the policy cannot."""
        assert self._open is None, "arrivals wait for the end of the step"
        block_size = self._config.block_size
        num_blocks_max = blocks_for(request.total_tokens_max, block_size)
        assert num_blocks_max <= self._entry.device_blocks, "impossible requests are refused before they get here"
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
        sequence = Sequence(seq_id, request, BlockTable(self.pool, block_size), num_blocks_max, level)
        sequence.level_path.append(level)
        sequence.last_us = request.arrival_us
        self._sequences[seq_id] = sequence
        self._entry.add(sequence)
        self.promises.watch(sequence)
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
        expired = self._entry.expired(now_us)
        for sequence in expired:
            self._finish(sequence, "timeout", now_us)
        for sequence in self._swaps.overdue(now_us) if self._swaps is not None else ():
            sequence.error = "a copy of KV between device and host was lost"
            self._finish(sequence, "error", now_us)
            expired.append(sequence)
        return expired

    def schedule(self, now_us: int) -> StepPlan | None:
        """Plan the next step; None when nothing is live, or nothing at all can be done. Else `apply` must follow.

        A plan may only copy; one without anything waits for a copy in flight.
        """
        assert self._open is None, "the step before has not been applied"
        swaps, memory, policy = self._swaps, self.memory, self.policy
        if not self._sequences and not memory.is_copying:
            return None
        self.promises.look(now_us, len(self._sequences))
        copies = Copies()
        if swaps is not None and not swaps.is_idle(self._ran_last):
            copies = swaps.plan(policy, self._ran_last, self._next_step_id, now_us)
        picked = self._pick(now_us)
        while not (picked.rows or copies.out or copies.back or memory.is_copying):
            policy.settle((), now_us)
            forced = swaps.force(policy, self._next_step_id, now_us) if swaps is not None else None
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
        """Let the policy pick, and take what fits."""
        policy, profile, entry, swaps, pool = self.policy, self._profile, self._entry, self._swaps, self.pool
        best, take, refuse, promises = policy.best, policy.take, policy.refuse, self.promises
        block_size, fixed_us = self._config.block_size, profile.fixed_us
        tokens_left, slots_left = self._config.max_batch_tokens, self._config.max_batch_size
        picked = _Picked([], [], [], [])
        live = self._sequences
        rows, sequences, works_us, marginals_us = picked.rows, picked.sequences, picked.works_us, picked.marginals_us
        refused: list[Sequence] = []
        if swaps is not None:
            swaps.begin_step(policy, self._ran_last)
        if entry.has_room_grown:
            entry.say_who_fits_again(policy, pool.num_free)
        policy.begin(now_us)
        is_closed = entry.begin(policy, refused, pool.num_free)
        room = entry.room_at_most(pool.num_free)
        while slots_left and tokens_left:
            seq_id = best()
            if seq_id is None:
                break
            sequence = live[seq_id]
            status = sequence.status
            is_new = False
            if status is not _RUNNING and status is not _PAUSED:
                is_new = status is _WAITING or status is _DROPPED
                if not is_new:
                    self._refuse(sequence)
                    continue
                if sequence.num_claim > room or not entry.fits(sequence, pool.num_free):
                    refuse(seq_id)
                    if swaps is not None:
                        swaps.refused(sequence, 0)
                    entry.refuse(policy, sequence)
                    refused.append(sequence)
                    if swaps is not None:
                        is_closed = is_closed or (entry.is_tried_enough and entry.close(policy, refused, pool.num_free))
                    continue
                self._start(sequence, now_us)
            request, output = sequence.request, sequence.output_token_ids
            start = sequence.num_computed
            is_decode = samples = True
            token_ids: tuple[int, ...]
            if start < sequence.replay_to:
                is_decode = samples = False
                end = min(self._chunk_end(start, sequence.num_to_fill, tokens_left), sequence.replay_to)
                token_ids = (request.prompt_token_ids + tuple(output))[start:end]
                work_us = 0
                marginal_us = profile.prefill_marginal_us(start, end - start)
            elif output:
                end = start + 1
                token_ids = (output[-1],)
                marginal_us = profile.decode_marginal_us(end)
                work_us = max(1, round(fixed_us + marginal_us))  # profile.decode_work_us
            else:
                is_decode = False
                end = self._chunk_end(start, len(request.prompt_token_ids), tokens_left)
                token_ids = request.prompt_token_ids[start:end]
                samples = end == len(request.prompt_token_ids)
                work_us = profile.prefill_work_us(start, end - start)
                marginal_us = profile.prefill_marginal_us(start, end - start)
            table = sequence.table
            missing = -(-end // block_size) - len(table.blocks)
            if missing > 0:
                if missing > pool.num_free:
                    self._refuse(sequence, missing)
                    continue
                table.grow_to(end)
                if swaps is not None:
                    swaps.grown(sequence, missing)
            take(seq_id, work_us)
            pause_us = now_us - sequence.last_us
            if status is not _RUNNING or pause_us > sequence.longest_pause_us or sequence.is_starving:
                promises.over(sequence, pause_us)
            works_us.append(work_us)
            marginals_us.append(marginal_us)
            sequences.append(sequence)
            rows.append(Row(seq_id, is_decode, start, token_ids, table.blocks, samples, request.sampling, len(output)))
            tokens_left -= end - start
            slots_left -= 1
            if is_new and not is_closed:
                is_closed = entry.close(policy, refused, pool.num_free)
        self._change_slots(sequences)
        return picked

    def apply(self, plan: StepPlan, result: StepResult, now_us: int) -> StepOutcome:
        """Book an executed plan: tokens, charges, levels, copies and endings. Charges, and what is carried for a team
        that has nothing live, sum to the step's measured time. What a failed row alone caused, its sequence pays.
        """
        step = self._open
        assert step is not None and step.plan is plan and result.step_id == plan.step_id, "not the open step"
        self._open = None
        swaps = self._swaps
        copy_us = swaps.bill_copies(plan, result) if swaps is not None else 0
        blamed_us = result.blamed_us
        shared_us = result.duration_us - copy_us - sum(blamed_us.values())
        assert shared_us >= 0, "a step's parts are at most the step"
        charges_us = split_step(shared_us, step.marginals_us, self._profile.fixed_us)
        served: list[Served] = []
        ending: list[tuple[Sequence, FinishReason]] = []
        new_tokens: list[tuple[int, ...]] = []
        failed, token_of = result.failed, result.token_ids
        for row, sequence, work_us, charge_us in zip(plan.rows, step.sequences, step.works_us, charges_us, strict=True):
            seq_id = row.seq_id
            sequence.last_us = now_us
            sequence.num_computed += len(row.token_ids)
            if swaps is not None and not row.is_decode:
                charge_us -= swaps.filled(sequence, row, charge_us)
            if blamed_us:
                charge_us += blamed_us.get(seq_id, 0)
            sequence.device_us += charge_us
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
            served.append(Served(seq_id, work_us, charge_us, bool(sequence.output_token_ids), reason is not None))

        self.bills.num_raised += result.num_raised
        overheads, charged = self.bills.close_step(step.sequences) if swaps is not None else ((), ())
        self.policy.settle(served, now_us, overheads)
        level_of = self.policy.level
        events: list[TokenEvent] = []
        for sequence, tokens in zip(step.sequences, new_tokens, strict=True):
            events.append(TokenEvent(sequence.request.request_id, tokens, sequence.device_us, sequence.level))
            level = level_of(sequence.seq_id)
            if level != sequence.level:
                sequence.level = level
                sequence.level_path.append(level)
        for sequence in charged:
            events.append(TokenEvent(sequence.request.request_id, (), sequence.device_us, sequence.level))
        if swaps is not None:
            swaps.land(self.policy, result)
            swaps.ran(step.sequences, result.duration_us)
        for sequence, reason in ending:
            self._finish(sequence, reason, now_us)
        return StepOutcome(tuple(events), tuple(sequence for sequence, _ in ending))

    def check(self) -> None:
        """Recount everything by owner and assert that the books agree. For tests and idle moments."""
        live = self._sequences.values()
        self.memory.check(s.table for s in live)
        self._entry.check(live)
        assert not any(s.is_finished for s in live)
        if self._swaps is not None:
            self._swaps.check()

    def _chunk_end(self, start: int, num_prompt: int, tokens_left: int) -> int:
        chunk = self._config.prefill_chunk_tokens
        return min(num_prompt, (start // chunk + 1) * chunk, start + tokens_left)

    def _start(self, sequence: Sequence, now_us: int) -> None:
        """It fits: it takes its first step, or its first since its KV was dropped."""
        self._entry.start(sequence)
        if sequence.first_step_us is None:
            sequence.first_step_us = now_us
        sequence.num_refusals = 0
        if self._swaps is not None:
            self._swaps.started(sequence)

    def _refuse(self, sequence: Sequence, missing: int = 0) -> None:
        """It was picked and has no place in this step: `missing` blocks to grow into, or all of its own."""
        self.policy.refuse(sequence.seq_id)
        entry, swaps = self._entry, self._swaps
        status = sequence.status
        if status is Status.SWAPPING_IN or status is Status.SWAPPING_OUT:
            return
        if swaps is not None:
            swaps.refused(sequence, missing)
            if status is Status.SWAPPED and swaps.is_tried_enough:
                self.policy.refuse_away()
        entry.refuse(self.policy, sequence)

    def _change_slots(self, picked: list[Sequence]) -> None:
        """Give the picked their slots; whoever ran in the step before and is not among them has lost its own."""
        gained = [sequence for sequence in picked if sequence.status is not _RUNNING]
        for sequence in gained:
            sequence.move_to(_RUNNING)
        kept = {sequence.seq_id for sequence in picked}
        lost = [s for s in self._ran_last if s.seq_id not in kept and s.status is _RUNNING]
        for sequence in lost:
            sequence.move_to(_PAUSED)
            sequence.num_preemptions += 1
        if lost:
            self.bills.note_preemptions(lost, gained)
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
        if self._swaps is not None:
            self._swaps.left(sequence)
        self._entry.leave(sequence)
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        sequence.ended_us = now_us
        self.promises.over(sequence, now_us - sequence.last_us)
        sequence.num_promotions = self.policy.num_promotions(sequence.seq_id)
        self.memory.release(sequence.table)
        del self._sequences[sequence.seq_id]
        self.policy.leave(sequence.seq_id, now_us)
