"""Carries out what `engine.memory.planner` decides: the scheduler's half that moves KV between device and host.

Moves are made before a step is picked, from what was refused in the step before, so a victim is never in the plan that
copies it and its newest block was written by an earlier step. A sequence whose copy is in flight is in no plan either.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from engine.blocks import blocks_for
from engine.config import EngineConfig
from engine.memory.billing import Bills, Cause
from engine.memory.claims import make_claims_fit
from engine.memory.holding import Place
from engine.memory.min_runs import MinRuns
from engine.memory.moves import Copies, Holder, Kind, Move, Need
from engine.memory.planner import SwapPlanner
from engine.memory.pools import Flight, KVMemory, LinkBudget
from engine.memory.starts import Starts
from engine.memory.view import MemoryView
from engine.plan import BlockCopy, Row, StepPlan, StepResult
from engine.request import Sequence
from policies.cost import StepProfile
from policies.policy import Policy

COPY_DEADLINE_US = 30_000_000  # a copy that takes longer is lost
_PLENTY = 4  # free blocks for each running sequence; above, the reserve is not looked at
_AVERAGE_SHIFT = 3  # a step's weight in the average step time is 1/8
AWAY_TRIED = 16  # sequences on the host that are asked for by the policy in a step; the others are refused unasked


class Mover:
    """Owns the planner, the link's budget, the causes of copies in flight, and what a step was refused for."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        profile: StepProfile,
        memory: KVMemory,
        starts: Starts,
        bills: Bills,
        sequences: Mapping[int, Sequence],
        block_copy_us: float,
    ) -> None:
        self._memory, self._starts, self._bills, self._sequences = memory, starts, bills, sequences
        self._policy = policy
        self._block_size = config.block_size
        self._slots = config.max_batch_size
        self._chunk_blocks = blocks_for(config.prefill_chunk_tokens, config.block_size)
        self._link = LinkBudget(block_copy_us, config.swap_link_percent)
        self._mode = config.memory_preemption
        self._planner = SwapPlanner(
            self._mode,
            gamma=config.swap_benefit,
            min_run_steps=config.swap_min_run_steps,
            copy_us=self._link.copy_us,
            has_host=memory.host.num_blocks > 0,
        )
        self.view = MemoryView(config, profile, memory, self._planner)
        self.needs: list[Need] = []  # of the step being picked, or of the last one
        self.blocked: dict[int, Sequence] = {}  # started, or dropped, and refused in that step, one by one
        self.num_dropped = 0
        self.num_forced = 0  # times that nothing could run, and room was made whatever the guards say
        self.grew: dict[int, int] = {}  # blocks taken in the last step, by team
        self._num_tried = 0  # sequences on the host that were refused one by one in that step
        self._min_runs = MinRuns(policy)
        self._replayed: list[Sequence] = []  # whole again by the step that is being booked
        self._causes: dict[int, Cause] = {}  # of the copies in flight
        self._begun_us: dict[int, int] = {}  # when they were planned, the oldest first
        self._step_us = 0
        self._now_us = 0

    def refused(self, sequence: Sequence, missing: int) -> None:
        """It was picked and has no place: `missing` blocks to grow into, when it has KV on the device."""
        if len(self.needs) < self._slots or sequence is self._starts.holder:
            num_blocks, kind = sequence.memory.num_claim, Kind.START
            if missing:
                num_blocks, kind = missing, Kind.GROW
            elif sequence.memory.place is Place.HOST:
                num_blocks, kind = self.view.wanted_to_return(sequence), Kind.UPLOAD
            sequence.memory.num_wanted = num_blocks
            self.needs.append(Need(sequence.seq_id, sequence.request.team_id, kind, num_blocks))
        elif missing:
            sequence.memory.num_wanted = missing
        if sequence.memory.place is not Place.NOWHERE:
            self.blocked[sequence.seq_id] = sequence
            self._starts.note_blocked(sequence.request.team_id)
            self._num_tried += sequence.memory.place is Place.HOST

    @property
    def num_away(self) -> int:
        """Sequences whose KV is on the host, or on the way there or back."""
        return len(self.view.away)

    @property
    def is_tried_enough(self) -> bool:
        """So many on the host were refused, just now the last of them, that the others may be, unasked: there are
        more than a plan finds room for, and the best come first.
        """
        return self._num_tried == AWAY_TRIED

    def _is_idle(self, ran_last: Collection[Sequence]) -> bool:
        """Nothing was refused, nobody is away or holds the reservation, and blocks are plenty: there is nothing to
        plan.
        """
        if self.needs or self.view.away or self._starts.holder is not None:
            return False
        return self._memory.device.num_free > len(ran_last) * (1 + len(self.view.half) * self._chunk_blocks)

    def plan(self, ran_last: Collection[Sequence], num_steps: int, now_us: int) -> Copies:
        """Move what should be moved before the next step."""
        if self._is_idle(ran_last):
            return Copies()
        policy = self._policy
        self._now_us = now_us
        copies = Copies()
        self._ask_for_holder()
        drops = make_claims_fit(self._starts, self.view, policy)
        self._carry_out(drops, copies, num_steps)
        holder = self._holder()
        needs = [need for need in self.needs if self._is_still(need, holder)]
        reserve = self.view.reserve(ran_last)
        pools = self.view.pools(reserve, self._link.left_us(now_us))
        ahead = reserve + min(pools.promised, len(self.view.half) * self._chunk_blocks)
        is_short = self._memory.device.num_free + self._memory.num_incoming < ahead
        if not (needs or is_short or (self.view.away and self._mode == "proactive")):
            return copies
        # While more are refused than a plan finds room for, nobody comes back ahead of its turn.
        most = 2 * self._slots if self._num_tried < AWAY_TRIED else 0
        frontier = self.view.frontier((need.seq_id for need in needs), most)
        may_drop = self.view.is_host_nearly_full and any(need.kind is Kind.GROW for need in needs)
        residents, away = self.view.sequences(self.view.away.values() if may_drop else frontier)
        timed = {resident.seq_id for resident in residents if not resident.is_protected}
        timed.update(need.seq_id for need in needs)
        timed.update(sequence.seq_id for sequence in frontier if sequence.memory.place is Place.HOST)
        turns = policy.turns(timed, self._slots, now_us)
        moves = self._planner.plan(
            msgspec.structs.replace(pools, reserve=ahead) if is_short and not needs else pools,
            residents,
            away,
            needs,
            turns,
            step_us=self._step_us,
            holder=holder,
            grower_team=max(self.grew, key=lambda team: (self.grew[team], -team), default=None),
            over_served=policy.over_served,
        )
        self._carry_out(moves, copies, num_steps)
        if holder is not None and any(move.for_seq == holder.seq_id for move in (*drops, *moves)):
            self._starts.note_progress()
        return copies

    def force(self, num_steps: int, now_us: int) -> Copies | None:
        """Nothing can run: make room whatever the guards say. None when not even that helps."""
        policy = self._policy
        needs = [*self.needs, *self._unasked()]
        if not needs:
            return None
        residents, away = self.view.sequences(self.view.away.values())
        turns = policy.turns({view.seq_id for group in (residents, away, needs) for view in group}, self._slots, now_us)
        moves = self._planner.force(
            self.view.pools(0, self._link.left_us(now_us)),
            residents,
            away,
            needs,
            turns,
            holder=self._holder(),
            over_served=policy.over_served,
        )
        if not moves:
            return None
        self.num_forced += 1
        copies = Copies()
        self._carry_out(moves, copies, num_steps)
        return copies

    def overdue(self, now_us: int) -> list[Sequence]:
        """Sequences whose copy should have been over long ago, and those too large for the blocks that are left.

        Nobody knows what such a copy will still touch, so its blocks stay out of use until it is over, if ever; but
        nobody waits for it.
        """
        late: dict[int, Sequence] = {}
        while self._begun_us:
            copy_id, begun_us = next(iter(self._begun_us.items()))
            if now_us - begun_us < COPY_DEADLINE_US:
                break
            del self._begun_us[copy_id]
            flight = self._memory.flights[copy_id]
            flight.is_lost = True
            num_blocks = len(flight.copy.pairs)
            self._starts.shrink(num_blocks, num_blocks)
            if not flight.is_orphan:
                late[flight.copy.seq_id] = self._sequences[flight.copy.seq_id]
            most = self._starts.device_blocks
            late |= {
                sequence.seq_id: sequence
                for sequence in self._sequences.values()
                if sequence.memory.num_blocks_max > most
            }
        return list(late.values())

    def bill_copies(self, plan: StepPlan, result: StepResult) -> int:
        """Charge the step's copy time to the causers, by blocks. Returns how much that is; the rest is the rows'.

        A step that has no copies of its own can only have stood still for those in flight.
        """
        copy_us = result.copy_us if plan.rows else result.duration_us
        copies = [*plan.copies_out, *plan.copies_in] or [f.copy for f in self._memory.flights.values() if not f.is_lost]
        if not (copy_us and copies):
            return 0
        causes = [(self._causes[copy.copy_id], len(copy.pairs)) for copy in copies]
        self._bills.bill_copies(copy_us, causes, self._sequences)
        return copy_us

    def replayed(self, sequence: Sequence, row: Row, charge_us: int) -> None:
        """A row computed KV again: its whole charge is billed to the team that displaced the sequence."""
        team_id = sequence.request.team_id
        payer = team_id if sequence.memory.displaced_by is None else sequence.memory.displaced_by
        self._bills.bill(charge_us, Cause(payer, sequence.memory.displaced_for, team_id), self._sequences)
        self._bills.replayed_tokens += len(row.token_ids)

    def filled_again(self, sequence: Sequence) -> None:
        """A replay has made the prompt and the output whole again: it counts as an upload."""
        self._planner.note_upload()
        self._replayed.append(sequence)
        self.filled(sequence)

    def filled(self, sequence: Sequence) -> None:
        """The prompt is whole."""
        self.view.filled(sequence)
        sequence.memory.displaced_by = None
        sequence.memory.num_cuts = 0

    def grown(self, sequence: Sequence, num_blocks: int) -> None:
        """It has taken so many blocks."""
        team_id = sequence.request.team_id
        self.grew[team_id] = self.grew.get(team_id, 0) + num_blocks
        if sequence.is_half:
            self._starts.use_kept(num_blocks)
            self.view.promise(sequence)

    def land(self, result: StepResult, ran: Iterable[Sequence]) -> None:
        """A step is over, and copies with it: blocks come free, and sequences are where they were going. Minimum runs
        get shorter, and the average step is learned. Between steps only.
        """
        next_step = result.step_id + 1
        self._min_runs.step_over(ran, next_step)
        for sequence in self._replayed:
            self._min_runs.begin(sequence, self._planner.min_run_steps, next_step)
        self._replayed = []
        for copy_id in result.copies_done:
            self._landed(self._memory.complete(copy_id), next_step)
        for copy_id in result.copies_failed:
            self._lost(self._memory.fail(copy_id))
        duration_us = result.duration_us
        self._step_us += (duration_us - self._step_us) >> _AVERAGE_SHIFT if self._step_us else duration_us

    def _over(self, flight: Flight) -> Cause:
        """A copy will touch its blocks no more."""
        self._begun_us.pop(flight.copy.copy_id, None)
        self._starts.note_room()
        if flight.is_lost:
            self._starts.shrink(-len(flight.copy.pairs), -len(flight.copy.pairs))
        return self._causes.pop(flight.copy.copy_id)

    def _landed(self, flight: Flight, next_step: int) -> None:
        """A copy is done before `next_step`. If it was an upload, its sequence may run again."""
        self._over(flight)
        sequence = self._sequences.get(flight.copy.seq_id)
        if sequence is None:
            return
        if flight.is_out:
            sequence.memory.move_to(Place.HOST)
            return
        sequence.memory.move_to(Place.DEVICE)
        self.view.came_back(sequence)
        self._policy.set_away(sequence.seq_id, False)
        self._policy.fits_again(sequence.seq_id)
        self._min_runs.begin(sequence, self._planner.min_run_steps, next_step)
        if not sequence.is_half:
            sequence.memory.displaced_by = None

    def _lost(self, flight: Flight) -> None:
        """A copy was given up: the sequence's KV is gone, and will be computed again."""
        cause = self._over(flight)
        sequence = self._sequences.get(flight.copy.seq_id)
        if sequence is not None:
            self._policy.set_away(sequence.seq_id, False)
            self._forget_kv(sequence, cause)

    def started(self, sequence: Sequence) -> None:
        """It takes its first step, or the first since its KV was dropped; its place still says which."""
        self.num_dropped -= sequence.memory.place is Place.LOST
        self.view.started(sequence)

    def left(self, sequence: Sequence) -> None:
        """It has ended; its place still says where it was."""
        self.num_dropped -= sequence.memory.place is Place.LOST
        self.view.forget(sequence)
        self.blocked.pop(sequence.seq_id, None)
        self._min_runs.forget(sequence)

    def announce(self, ran_last: Collection[Sequence]) -> None:
        """Tell the policy which refused sequences would fit now, and begin to note who is refused in the next step."""
        starts, free = self._starts, self._memory.device.num_free
        if starts.has_room_grown:
            for sequence in self.blocked.values():
                memory = sequence.memory
                if (memory.place is Place.DEVICE and memory.num_wanted <= free) or (
                    memory.place is Place.LOST and starts.fits(sequence, free)
                ):
                    self._policy.fits_again(sequence.seq_id)
        teams = [sequence.request.team_id for sequence in self.blocked.values()]
        if self._num_tried >= AWAY_TRIED:
            teams += [sequence.request.team_id for sequence in self.view.away.values()]
        kept = self.view.num_promised
        if free <= _PLENTY * len(ran_last):
            kept += self.view.reserve(ran_last)
        starts.announce(kept, teams)
        self.needs = []
        self._num_tried = 0
        self.blocked = {}
        self.grew = {}

    def check(self) -> None:
        """Assert that what is counted here agrees with the sequences."""
        live = self._sequences.values()
        self.view.check(live)
        self._min_runs.check(live)
        assert self.num_dropped == sum(s.memory.place is Place.LOST for s in live)
        on_device = [s for s in self.view.half.values() if s.memory.place in (Place.DEVICE, Place.COMING_BACK)]
        half = sum(blocks_for(s.num_to_fill, self._block_size) for s in on_device)
        assert self._starts.num_half == half <= self._memory.device.num_blocks
        flights = {flight.copy.seq_id: flight for flight in self._memory.flights.values() if not flight.is_orphan}
        for sequence in live:
            is_moving = sequence.memory.place in (Place.GOING_OUT, Place.COMING_BACK)
            assert is_moving == (sequence.seq_id in flights)
        assert self._causes.keys() == self._memory.flights.keys()

    def _ask_for_holder(self) -> None:
        """A new holder of the reservation is among `needs`, also when its last step was closed to all new ones."""
        holder = self._starts.holder
        if holder is None or holder.memory.is_started or any(need.seq_id == holder.seq_id for need in self.needs):
            return
        num_blocks = holder.memory.num_wanted = holder.memory.num_claim
        self.needs.append(Need(holder.seq_id, holder.request.team_id, Kind.START, num_blocks))

    def _holder(self) -> Holder | None:
        """The holder of the reservation, and which teams with KV on the device are ahead of its team."""
        sequence = self._starts.holder
        if sequence is None:
            return None
        num_blocks: dict[int, int] = {}
        for resident in self.view.resident.values():
            team_id = resident.request.team_id
            num_blocks[team_id] = num_blocks.get(team_id, 0) + len(resident.memory.table.blocks)
        ahead = frozenset(self._policy.ahead_of(num_blocks, sequence.request.team_id))
        large = frozenset(team for team in ahead if num_blocks[team] > self._starts.share_of(team))
        return Holder(sequence.seq_id, ahead, large)

    def _is_still(self, need: Need, holder: Holder | None) -> bool:
        """Room would help it. Of those not started only the holder is served before it may claim: half-computed
        prompts of teams ahead of its own may give way to it.
        """
        sequence = self._sequences.get(need.seq_id)
        if sequence is None:
            return False
        if need.kind is not Kind.START:
            return sequence.memory.place is not Place.LOST
        if holder is None or need.seq_id != holder.seq_id:
            return self._starts.may_claim(sequence)
        movable = [half for half in self.view.half.values() if half.request.team_id in holder.ahead]
        return self._starts.may_claim_without(
            sequence, [half for half in movable if half.memory.place is Place.DEVICE and not half.memory.is_protected]
        )

    def _unasked(self) -> list[Need]:
        """What those lack that were refused when `needs` was full: perhaps the only ones that room can be made for."""
        asked = {need.seq_id for need in self.needs}
        needs = []
        blocked = list(self.blocked.values())
        if self._num_tried >= AWAY_TRIED:
            blocked += [sequence for sequence in self.view.away.values() if sequence.seq_id not in self.blocked]
        for sequence in blocked:
            if sequence.memory.place in (Place.GOING_OUT, Place.COMING_BACK):
                continue
            num_blocks, kind = sequence.memory.num_wanted, Kind.GROW
            if sequence.memory.place is Place.HOST:
                num_blocks, kind = self.view.wanted_to_return(sequence), Kind.UPLOAD
            elif sequence.memory.place is Place.LOST:
                num_blocks, kind = sequence.memory.num_claim, Kind.START
            if sequence.seq_id not in asked:
                needs.append(Need(sequence.seq_id, sequence.request.team_id, kind, num_blocks))
        return needs

    def _carry_out(self, moves: Iterable[Move], copies: Copies, num_steps: int) -> None:
        for move in moves:
            sequence = self._sequences[move.seq_id]
            if move.kind == "forget":
                self._memory.forget_host_copy(sequence.memory.table)
            elif move.kind == "in":
                copies.back.append(self._bring_back(sequence))
            else:
                cause = Cause(move.team_id, move.for_seq, sequence.request.team_id)
                if sequence.is_running:
                    copies.displaced.append(sequence)
                    self._bills.counts(cause.team_id, cause.victim_team).preemptions += 1
                self._starts.note_room()
                if move.kind == "drop":
                    if sequence.memory.place is Place.DEVICE:
                        since = (
                            None if sequence.memory.uploaded_step is None else num_steps - sequence.memory.uploaded_step
                        )
                        self._planner.note_out(since)
                    self._memory.drop(sequence.memory.table)
                    self._policy.set_away(sequence.seq_id, False)
                    self._forget_kv(sequence, cause)
                else:
                    copy = self._move_out(sequence, cause, num_steps)
                    if copy is not None:
                        copies.out.append(copy)

    def _move_out(self, sequence: Sequence, cause: Cause, num_steps: int) -> BlockCopy | None:
        since = None if sequence.memory.uploaded_step is None else num_steps - sequence.memory.uploaded_step
        self._planner.note_out(since)
        self._min_runs.forget(sequence)
        sequence.memory.displaced_by, sequence.memory.displaced_for = cause.team_id, cause.for_seq
        sequence.memory.num_swaps += 1
        copy = self._memory.swap_out(sequence.seq_id, sequence.memory.table, sequence.num_computed)
        sequence.memory.move_to(Place.GOING_OUT)
        self._starts.went_out(sequence)
        self._policy.set_away(sequence.seq_id, True)
        self.view.went_out(sequence)
        counts = self._bills.counts(cause.team_id, cause.victim_team)
        counts.swaps_out += 1
        if copy is None:
            sequence.memory.move_to(Place.HOST)
            return None
        self._note(copy, cause)
        counts.blocks_out += len(copy.pairs)
        return copy

    def _bring_back(self, sequence: Sequence) -> BlockCopy:
        self._starts.end_reservation(sequence)
        team_id = sequence.request.team_id
        payer = team_id if sequence.memory.displaced_by is None else sequence.memory.displaced_by
        cause = Cause(payer, sequence.memory.displaced_for, team_id)
        copy = self._memory.swap_in(sequence.seq_id, sequence.memory.table, self.view.wanted_to_return(sequence))
        self._starts.grown(sequence, len(sequence.memory.table.blocks))
        sequence.memory.move_to(Place.COMING_BACK)
        self._starts.comes_back(sequence)
        self._planner.note_upload()
        self._note(copy, cause)
        counts = self._bills.counts(cause.team_id, team_id)
        counts.swaps_in += 1
        counts.blocks_in += len(copy.pairs)
        return copy

    def _note(self, copy: BlockCopy, cause: Cause) -> None:
        self._causes[copy.copy_id] = cause
        self._begun_us[copy.copy_id] = self._now_us
        self._link.use(len(copy.pairs))

    def _forget_kv(self, sequence: Sequence, cause: Cause) -> None:
        """Its KV is gone, wherever it was."""
        self.view.forget(sequence)
        self._min_runs.forget(sequence)
        self._starts.leave(sequence)
        sequence.memory.num_cuts += sequence.is_half
        sequence.memory.move_to(Place.LOST)
        sequence.memory.replay_to = max(sequence.memory.replay_to, sequence.num_computed)
        sequence.memory.num_computed = 0
        sequence.memory.num_recomputes += 1
        sequence.memory.displaced_by, sequence.memory.displaced_for = cause.team_id, cause.for_seq
        self._starts.resize(sequence)
        self.num_dropped += 1
        self._bills.counts(cause.team_id, cause.victim_team).recomputes += 1


class Stayer:
    """Moves nothing: KV stays on the device until its sequence ends. `Mover` for the mode "none"."""

    num_away = num_dropped = num_forced = 0
    is_tried_enough = False

    def plan(self, ran_last: Collection[Sequence], num_steps: int, now_us: int) -> Copies:
        return Copies()

    def force(self, num_steps: int, now_us: int) -> Copies | None:
        return None

    def announce(self, ran_last: Collection[Sequence]) -> None:
        pass

    def overdue(self, now_us: int) -> list[Sequence]:
        return []

    def refused(self, sequence: Sequence, missing: int) -> None:
        pass

    def started(self, sequence: Sequence) -> None:
        pass

    def grown(self, sequence: Sequence, num_blocks: int) -> None:
        pass

    def bill_copies(self, plan: StepPlan, result: StepResult) -> int:
        return 0

    def replayed(self, sequence: Sequence, row: Row, charge_us: int) -> None:
        raise AssertionError("KV that stays is never computed again")

    def filled_again(self, sequence: Sequence) -> None:
        raise AssertionError("KV that stays is never computed again")

    def filled(self, sequence: Sequence) -> None:
        pass

    def land(self, result: StepResult, ran: Iterable[Sequence]) -> None:
        assert not (result.copies_done or result.copies_failed), "nothing was copied"

    def left(self, sequence: Sequence) -> None:
        pass

    def check(self) -> None:
        pass
