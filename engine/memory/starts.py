"""Who may start: the line of those without KV, the start rule, and the one reservation. The scheduler's own part.

* **Start rule.** A sequence starts only if its *claim* fits beside the claims of all started ones. Where KV can be
  taken back from paused sequences, a claim is the blocks of what it holds (half-prefilled: of its whole prompt) and one
  block to grow into, and they share device and host; in addition all half-prefilled prompts together fit the device,
  for those are never dropped, and its own prompt fits the device now, beside what is promised to others. Where KV
  cannot be taken back, a claim is prompt and clamped max tokens on the device, and growth never fails.
* **Reservation** (docs/scheduling.md). The first sequence refused more than 16 times holds the one reservation until
  it fits; others start, or come back from the host, only beside it. One holder cannot deadlock, and a large head
  cannot starve behind small ones. It is the policy's `claimant` whose sequences may hold it, and it is taken back from
  a team that is no longer that.
* **Closed steps.** When not even the smallest new sequence fits, all are refused at once, so a full pool costs no more
  than an empty queue. Such a step counts as a refusal for each; the reservation then goes to the oldest.
"""

import heapq
from collections.abc import Collection

from engine.blocks import blocks_for
from engine.request import Sequence, Status
from policies.policy import Policy

REFUSALS_BEFORE_RESERVATION = 16
TRIED_BEFORE_CLOSING = 4  # newcomers that are asked for by the policy, so that room can be made for the best of them


class Entry:
    """Owns the waiting line, the sum of claims and the reservation."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, block_size: int, *, can_take_back: bool) -> None:
        self.can_take_back = can_take_back
        self.device_blocks = num_device_blocks
        self._capacity = num_device_blocks + num_host_blocks if can_take_back else num_device_blocks
        self._block_size = block_size
        self.waiting: dict[int, Sequence] = {}  # without a first step, in order of arrival
        self.waiting_of: dict[int, dict[int, Sequence]] = {}  # the same by team
        self.holder: Sequence | None = None  # of the reservation
        self.has_room_grown = False  # since it was last said who fits again
        self.is_short = False  # somebody was refused for blocks since this was last set back
        self.num_claimed = 0  # of all started sequences
        self.num_half = 0  # blocks of the whole prompts that are half computed
        self.blocked_teams: set[int] = set()  # teams with sequences beside the line that wait for blocks
        self.kept = 0  # device blocks not for newcomers in this step: promised to half prompts, and the reserve
        self._needs: list[tuple[int, int]] = []  # heap of (num_claim, seq_id), also of sequences long started
        self._num_closed = 0  # steps in which nothing new fitted
        self._num_tried = 0  # newcomers of this step that only the device had no room for
        self._claimant: int | None = None  # of this step, once it is known; None is any team
        self._is_claimant_known = False
        self._deadlines: list[tuple[int, int]] = []  # heap of (start_by_us, seq_id), also of sequences long started

    def add(self, sequence: Sequence) -> None:
        """A new one, at the end of the line."""
        self.resize(sequence)
        seq_id = sequence.seq_id
        sequence.num_closed_before = self._num_closed
        self.waiting[seq_id] = sequence
        self.waiting_of.setdefault(sequence.request.team_id, {})[seq_id] = sequence
        heapq.heappush(self._needs, (sequence.num_claim, seq_id))
        if len(self._needs) > 2 * len(self.waiting) + 64:  # else a small one that waits long keeps all that have gone
            self._needs = [need for need in self._needs if need[1] in self.waiting]
            heapq.heapify(self._needs)
        if sequence.request.start_by_us is not None:
            heapq.heappush(self._deadlines, (sequence.request.start_by_us, seq_id))

    def expired(self, now_us: int) -> list[Sequence]:
        """Those of the line that should have started by now."""
        due: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            sequence = self.waiting.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                due.append(sequence)
        if len(self._deadlines) > 2 * len(self.waiting) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.waiting]
            heapq.heapify(self._deadlines)
        return due

    @property
    def capacity(self) -> int:
        """Blocks that claims may come to: those of device and host."""
        return self._capacity

    def shrink(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """So many blocks are out of use."""
        self.device_blocks -= num_device_blocks
        self._capacity -= num_device_blocks + num_host_blocks

    def begin(self, policy: Policy, refused: list[Sequence], free: int) -> bool:
        """A step is being picked. Is it closed?"""
        self._num_tried = 0
        self._is_claimant_known = False
        if self.holder is not None and not self._may_hold(policy, self.holder):
            self.holder = None
            self.has_room_grown = True
        return self.close(policy, refused, free)

    def close(self, policy: Policy, refused: list[Sequence], free: int) -> bool:
        """Refuse all new sequences at once when not even the smallest fits. This step has `refused` some before."""
        needs, waiting = self._needs, self.waiting
        while needs and needs[0][1] not in waiting:
            heapq.heappop(needs)
        if not needs or not waiting:
            return False
        holder = self.holder
        reserved = holder.num_claim if holder is not None and not holder.is_started else 0
        room = self._capacity - self.num_claimed - reserved
        if self.can_take_back:
            room = min(room, self.device_blocks - self.num_half + 1)
        is_shut = needs[0][0] > room
        if not is_shut and self.is_tried_enough:
            held = holder.num_wanted if holder is not None else 0
            is_shut = needs[0][0] > free - self.kept - held
        if not is_shut or (holder is not None and not holder.is_started and self.fits(holder, free)):
            return False
        policy.refuse_new()
        self.is_short = True
        self._num_closed += 1
        for sequence in refused:
            sequence.num_refusals -= 1  # a step counts once
        if self.holder is None:
            claimant = self._find_claimant(policy)
            line = waiting if claimant is None else self.waiting_of.get(claimant)
            if line:
                self._reserve_for(policy, next(iter(line.values())))
        return True

    @property
    def is_tried_enough(self) -> bool:
        """So many newcomers were refused that the others may be, unasked."""
        return self.can_take_back and self._num_tried >= TRIED_BEFORE_CLOSING

    def room_at_most(self, free: int) -> int:
        """What claims more starts neither now nor later in this step; with `free` device blocks."""
        room = self._capacity - self.num_claimed
        return min(room, free) if self.can_take_back else room

    def fits(self, sequence: Sequence, free: int) -> bool:
        """Whether one that is not started may start now, with `free` device blocks."""
        if not self.may_claim(sequence):
            return False
        if not self.can_take_back:
            return True
        holder = self.holder
        is_other = holder is not None and holder is not sequence
        kept = self.kept if holder is not sequence else min(self.kept, self.num_half)
        return sequence.num_claim <= free - kept - (holder.num_wanted if is_other else 0)  # type: ignore[union-attr]

    def may_claim(self, sequence: Sequence) -> bool:
        """Whether its claim fits beside all others', whatever is free on the device."""
        holder = self.holder
        is_other = holder is not None and holder is not sequence
        reserved = holder.num_claim if is_other and not holder.is_started else 0  # type: ignore[union-attr]
        if self.num_claimed + reserved + sequence.num_claim > self._capacity:
            return False
        if not self.can_take_back:
            return True
        return self.num_half + blocks_for(sequence.num_to_fill, self._block_size) <= self.device_blocks

    def start(self, sequence: Sequence) -> None:
        """It fits, and starts."""
        if self.holder is sequence:
            self.holder = None
        sequence.num_claimed = sequence.num_claim
        self.num_claimed += sequence.num_claim
        if self.can_take_back:
            whole = blocks_for(sequence.num_to_fill, self._block_size)
            self.num_half += whole
            self.kept += whole
        if sequence.status is Status.WAITING:
            self._forget_waiting(sequence)

    def grown(self, sequence: Sequence, num_blocks: int) -> None:
        """A started one holds so many blocks now, and claims one more while it may need it."""
        claim = min(sequence.num_blocks_max, num_blocks + 1)
        if claim > sequence.num_claimed:
            self.num_claimed += claim - sequence.num_claimed
            sequence.num_claimed = claim

    def filled(self, sequence: Sequence) -> None:
        """The prompt (or what had to be computed again) is whole."""
        self.num_half -= blocks_for(sequence.num_to_fill, self._block_size)

    def leave(self, sequence: Sequence) -> None:
        """It has ended, or its KV was dropped: its claim is free."""
        if sequence.status is Status.WAITING:
            self._forget_waiting(sequence)
        else:
            if sequence.num_claimed and self.can_take_back and sequence.is_half:
                self.filled(sequence)
            self.num_claimed -= sequence.num_claimed
            sequence.num_claimed = 0
        self.has_room_grown = True
        if self.holder is sequence:
            self.holder = None

    def refuse(self, policy: Policy, sequence: Sequence) -> None:
        """It was refused for blocks."""
        self.is_short = True
        sequence.num_refusals += 1
        self._num_tried += not sequence.num_claimed  # it is not started
        if self.holder is None:
            self._reserve_for(policy, sequence)

    def say_who_fits_again(self, policy: Policy, free: int) -> None:
        """When room has grown, the policy hears of each team's oldest refused sequence that would fit now. A policy
        that thought the team unable to run would otherwise never try it again behind others of better levels.
        """
        self.has_room_grown = False
        holder = self.holder
        room = self._capacity - self.num_claimed  # for one that is not the holder, at most
        if self.can_take_back:
            room = min(room, free - self.kept - (holder.num_wanted if holder is not None else 0))
        for line in self.waiting_of.values():
            oldest = next(iter(line.values()))
            if oldest.num_claim > room and oldest is not holder:
                continue
            if (oldest.num_refusals or self._num_closed > oldest.num_closed_before) and self.fits(oldest, free):
                policy.fits_again(oldest.seq_id)

    def check(self, live: Collection[Sequence]) -> None:
        """Assert that claims and lines agree with the sequences."""
        started = [s for s in live if s.is_started]
        assert self.num_claimed == sum(s.num_claimed for s in started)
        assert not any(s.num_claimed or s.table.blocks or s.table.host for s in live if not s.is_started)
        assert len(self.waiting) == sum(s.status is Status.WAITING for s in live)
        assert len(self.waiting) == sum(len(line) for line in self.waiting_of.values())
        assert all(len(s.table.blocks) <= s.num_blocks_max for s in started)
        if not self.can_take_back:
            assert self.num_claimed <= self.device_blocks
            assert all(s.num_claimed == s.num_blocks_max for s in started)

    def resize(self, sequence: Sequence) -> None:
        """What it claims when it starts: for a new one, and for one that lost its KV."""
        most = sequence.num_blocks_max
        held = blocks_for(sequence.num_to_fill, self._block_size)
        sequence.num_claim = min(most, held + 1) if self.can_take_back else most
        sequence.num_wanted = sequence.num_claim

    def _find_claimant(self, policy: Policy) -> int | None:
        """Whose sequences may hold the reservation in this step; asked only when somebody might."""
        if not self._is_claimant_known:
            self._is_claimant_known = True
            holding = self.holder.request.team_id if self.holder is not None else None
            teams: Collection[int] = self.waiting_of
            if self.can_take_back:
                teams = {*teams, *self.blocked_teams, *(() if holding is None else (holding,))}
            self._claimant = policy.claimant(teams, holding)
        return self._claimant

    def _may_hold(self, policy: Policy, sequence: Sequence) -> bool:
        return self._find_claimant(policy) in (None, sequence.request.team_id)

    def _reserve_for(self, policy: Policy, sequence: Sequence) -> None:
        """Give the free reservation to a sequence that was refused often enough, if its team may hold it."""
        num_refusals = sequence.num_refusals
        if sequence.status is Status.WAITING:
            num_refusals += self._num_closed - sequence.num_closed_before
        if num_refusals > REFUSALS_BEFORE_RESERVATION and self._may_hold(policy, sequence):
            self.holder = sequence
            self.has_room_grown = True  # for the holder

    def _forget_waiting(self, sequence: Sequence) -> None:
        del self.waiting[sequence.seq_id]
        team_id = sequence.request.team_id
        line = self.waiting_of[team_id]
        del line[sequence.seq_id]
        if not line:
            del self.waiting_of[team_id]
