"""The one door to KV memory: who may start or grow, what moves between device and host, and who pays for it.

While a step is picked the scheduler asks two questions about the sequence that the policy offers: `start`, for a
sequence without KV, and `reach`, for the blocks of its next tokens. Each has one answer. (They are two, because how
far a row reaches is worked out only for sequences that may run; hundreds may be refused in a step.) All else happens
between steps: `prepare` (or `force`, when nothing could run) plans copies, `book` says what a step cost beside its
rows, `land` takes note of copies that are over, `end` takes back what a sequence held.

| part | owns |
|---|---|
| `engine.memory.pools` | the blocks of both pools, and copies in flight |
| `engine.memory.starts` | the waiting line, the claims, the reservation |
| `engine.memory.mover` | the plan of moves, and what was refused; `Stayer` where KV stays until its sequence ends |
| `engine.memory.billing` | bills for copies and replays |

A refusal is told to the policy here, because what the memory says of others (all newcomers, all on the host, who may
hold the reservation) depends on the policy having heard of it.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass

from engine.blocks import BlockPool, BlockTable, blocks_for
from engine.config import EngineConfig
from engine.memory.billing import Bills
from engine.memory.holding import Holding
from engine.memory.holding import Place as Place
from engine.memory.mover import Mover, Stayer
from engine.memory.moves import Copies
from engine.memory.pools import KVMemory
from engine.memory.starts import GrowingClaims, Starts, WholeClaims
from engine.plan import Row, StepPlan, StepResult
from engine.request import Request, Sequence
from policies.cost import StepProfile, split_step
from policies.policy import Policy
from policies.sequences import Overhead, TeamTerms

# Looked up once: a member of an enumeration is found anew at each access, and these are asked for 64 times a step.
_DEVICE, _NOWHERE, _LOST = Place.DEVICE, Place.NOWHERE, Place.LOST


@dataclass(frozen=True, slots=True)
class Booked:
    """A step's time in whole microseconds: `charges_us` by row, and what belongs to no row."""

    charges_us: Run[int]
    overheads: Run[Overhead]
    charged: Run[Sequence]  # sequences that pay for copies or replays without having run


class MemoryManager:
    """Owns the KV memory of one engine. `sequences` are the live ones, read only."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        profile: StepProfile,
        sequences: Mapping[int, Sequence],
        num_device_blocks: int,
        num_host_blocks: int,
        block_copy_us: float,
    ) -> None:
        """`block_copy_us` is the time of one block's copy, one way. Without a host pool nothing can be swapped: KV is
        taken back as in the mode "recompute".
        """
        self.mode = config.memory_preemption  # the one that is in force
        if num_host_blocks <= 0 and self.mode != "none":
            self.mode = "recompute"
        if self.mode in ("none", "recompute"):
            num_host_blocks = 0
        self._policy, self._profile = policy, profile
        self._block_size = config.block_size
        self._pools = KVMemory(num_device_blocks, num_host_blocks)
        rule = WholeClaims() if self.mode == "none" else GrowingClaims()
        self._tried_max = rule.tried_max
        self._starts = Starts(rule, num_device_blocks, num_host_blocks, config.block_size)
        self.bills = Bills()
        self._mover: Mover | Stayer = Stayer()
        if self.mode != "none":
            self._mover = Mover(
                config, policy, profile, self._pools, self._starts, self.bills, sequences, block_copy_us
            )
        self._refused: list[Sequence] = []  # newcomers of this step, one by one
        self._is_closed = False  # this step, for newcomers
        self._room = 0  # blocks: what claims more does not start in this step

    # -- what others may know ----------------------------------------------------------------------------------------

    @property
    def device(self) -> BlockPool:
        """The device's blocks. Read only."""
        return self._pools.device

    @property
    def host(self) -> BlockPool:
        """The host's blocks. Read only."""
        return self._pools.host

    @property
    def is_copying(self) -> bool:
        """Copies are in flight that a sequence waits for."""
        return self._pools.is_copying

    @property
    def num_waiting(self) -> int:
        """Sequences without a first step."""
        return len(self._starts.waiting)

    @property
    def num_away(self) -> int:
        """Sequences whose KV is on the host, or on the way there or back."""
        return self._mover.num_away

    @property
    def num_dropped(self) -> int:
        """Sequences whose KV is gone and will be computed again."""
        return self._mover.num_dropped

    @property
    def num_forced(self) -> int:
        """Times that nothing could run, and room was made whatever the guards say."""
        return self._mover.num_forced

    @property
    def tokens_max(self) -> int:
        """Tokens that the device's blocks hold when no sequence has any."""
        return self._starts.device_blocks * self._block_size

    @property
    def reserved_for(self) -> int | None:
        """The sequence that holds the reservation."""
        holder = self._starts.holder
        return holder.seq_id if holder is not None else None

    def take_shortage(self) -> bool:
        """Whether a sequence was refused for blocks since the last call, or the lags had not come back from that."""
        return self._starts.take_shortage(self._policy.is_band_wide())

    # -- sequences come and go ---------------------------------------------------------------------------------------

    def configure(self, teams: Collection[TeamTerms]) -> None:
        """The table of teams is this from now on."""
        self._starts.configure(teams)

    def hold(self, request: Request) -> Holding:
        """What the memory keeps for a new sequence. The request fits the pool alone."""
        num_blocks_max = blocks_for(request.total_tokens_max, self._block_size)
        assert num_blocks_max <= self._starts.device_blocks, "impossible requests are refused before they get here"
        return Holding(BlockTable(self._pools.device, self._block_size), num_blocks_max)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits for its start."""
        self._starts.add(sequence)

    def expired(self, now_us: int) -> list[Sequence]:
        """Sequences that should have started by now."""
        return self._starts.expired(now_us)

    def overdue(self, now_us: int) -> list[Sequence]:
        """Sequences whose copy should have been over long ago, and those too large for the blocks that are left."""
        return self._mover.overdue(now_us)

    def end(self, sequence: Sequence) -> None:
        """Take back what a sequence holds, wherever that is; blocks of a copy in flight come back when it is over."""
        self._mover.left(sequence)
        self._starts.leave(sequence)
        self._pools.release(sequence.memory.table)
        sequence.memory.move_to(Place.RELEASED)

    # -- before a step -----------------------------------------------------------------------------------------------

    def prepare(self, ran_last: Collection[Sequence], step_id: int, now_us: int) -> Copies:
        """Plan the copies of the next step, and tell the policy which sequences fit again. Between steps."""
        copies = self._mover.plan(ran_last, step_id, now_us)
        self._announce(ran_last)
        return copies

    def force(self, step_id: int, now_us: int) -> Copies | None:
        """Nothing could run: make room whatever the guards say. None when not even that helps."""
        copies = self._mover.force(step_id, now_us)
        if copies is not None:
            self._announce(())
        return copies

    def _announce(self, ran_last: Collection[Sequence]) -> None:
        self._mover.announce(ran_last)
        if self._starts.has_room_grown:
            self._starts.say_who_fits_again(self._policy, self._pools.device.num_free)

    # -- while a step is picked --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step is being picked. May newcomers start in it at all?"""
        free = self._pools.device.num_free
        self._refused = []
        self._is_closed = self._starts.begin(self._policy, self._refused, free)
        self._room = self._starts.room_at_most(free)

    def start(self, sequence: Sequence) -> bool:
        """May this sequence, the policy's best, whose KV is not on the device, start or start again in this step?

        False: it is refused, and the policy knows. So is every sequence whose KV is on the host or on its way.
        """
        memory = sequence.memory
        place = memory.place
        if place is not _NOWHERE and place is not _LOST:
            self._refuse(sequence)
            return False
        if place is _NOWHERE and self._starts.is_held_back(sequence):
            self._policy.leave_new(sequence.request.team_id)
            return False
        if memory.num_claim > self._room or not self._starts.fits(sequence, self._pools.device.num_free):
            self._refuse_start(sequence)
            return False
        self._starts.start(sequence)
        self._mover.started(sequence)
        memory.move_to(_DEVICE)
        return True

    def reach(self, sequence: Sequence, end: int) -> bool:
        """Has this sequence, the policy's best, with its KV on the device, the blocks for its tokens up to `end`?

        True: it has them now. False: it is refused, and the policy knows.
        """
        table = sequence.memory.table
        missing = -(-end // self._block_size) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > self._pools.device.num_free:
            self._refuse(sequence, missing)
            return False
        table.grow_to(end)
        self._starts.end_reservation(sequence)
        self._starts.grown(sequence, len(table.blocks))
        self._mover.grown(sequence, missing)
        return True

    def started(self) -> None:
        """The policy has taken a newcomer: do the others still fit?"""
        if not self._is_closed:
            self._close_if_full()

    def _close_if_full(self) -> None:
        self._is_closed = self._starts.close_if_full(self._policy, self._refused, self._pools.device.num_free)

    def _refuse_start(self, sequence: Sequence) -> None:
        self._policy.refuse(sequence.seq_id)
        self._mover.refused(sequence, 0)
        self._starts.refuse(self._policy, sequence)
        self._refused.append(sequence)
        if self._starts.num_tried >= self._tried_max and not self._is_closed:
            self._close_if_full()

    def _refuse(self, sequence: Sequence, missing: int = 0) -> None:
        """It has no place in this step: it lacks `missing` blocks to grow into, or all of its own."""
        self._policy.refuse(sequence.seq_id)
        place = sequence.memory.place
        if place is Place.COMING_BACK or place is Place.GOING_OUT:
            return
        self._mover.refused(sequence, missing)
        if place is Place.HOST and self._mover.is_tried_enough:
            self._policy.refuse_away()
        self._starts.refuse(self._policy, sequence)

    # -- after a step ------------------------------------------------------------------------------------------------

    def book(self, plan: StepPlan, result: StepResult, ran: Run[Sequence], marginals_us: Run[float]) -> Booked:
        """Count what a step computed, and split its time: copies and replays to who caused them, attempts that raised
        to the rows that made them raise, the rest to all rows.

        `ran` and `marginals_us` are the plan's rows, in their order. Charges, overheads and what is carried for a team
        that has nothing live sum to the step's measured time.
        """
        copy_us = self._mover.bill_copies(plan, result)
        blamed_us = result.blamed_us
        shared_us = result.duration_us - copy_us - sum(blamed_us.values())
        assert shared_us >= 0, "a step's parts are at most the step"
        charges_us = split_step(shared_us, marginals_us, self._profile.fixed_us)
        replays: list[int] = []
        for index, (sequence, row, charge_us) in enumerate(zip(ran, plan.rows, charges_us, strict=True)):
            if row.is_decode:
                sequence.memory.num_computed += 1
            elif self._computed(sequence, row, charge_us):
                replays.append(index)
        for index in replays:
            charges_us[index] = 0
        for index, row in enumerate(plan.rows) if blamed_us else ():
            charges_us[index] += blamed_us.get(row.seq_id, 0)
        self.bills.charge(ran, charges_us)
        self.bills.num_raised += result.num_raised
        overheads, charged = self.bills.settle_step(ran)
        return Booked(charges_us, overheads, charged)

    def _computed(self, sequence: Sequence, row: Row, charge_us: int) -> bool:
        """A row of prompt or replay is done. True when its charge is billed to the team that made it replay."""
        memory = sequence.memory
        memory.num_computed += len(row.token_ids)
        is_replay = row.start < memory.replay_to
        if is_replay:
            self._mover.replayed(sequence, row, charge_us)
        if not sequence.is_half:
            self._starts.filled(sequence)
            if is_replay:
                self._mover.filled_again(sequence)
            else:
                self._mover.filled(sequence)
        return is_replay

    def land(self, result: StepResult, ran: Iterable[Sequence]) -> None:
        """Copies are over, and the step with them. Between steps."""
        self._mover.land(result, ran)

    def check(self, live: Collection[Sequence]) -> None:
        """Recount everything by owner and assert that the books agree."""
        self._pools.check(sequence.memory.table for sequence in live)
        self._starts.check(live)
        self._mover.check()
