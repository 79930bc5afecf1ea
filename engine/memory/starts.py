"""Who may start: the line of sequences without KV, the start rule, and the one reservation.

* **Start rule.** A sequence starts only if its *claim* fits beside the claims of all started sequences. `GrowingClaims`
  is the rule where KV can be taken back: a claim is the blocks of what the sequence holds (of a half-computed prompt:
  of the whole prompt) and one block to grow into; claims share device and host; all half-computed prompts on the device
  fit it together, since these are never dropped; and the sequence's own prompt fits the device now, beside what is
  promised to others. `WholeClaims` is the rule where KV stays: a claim is the prompt and the clamped max tokens on the
  device, and growth never fails.
* **Share.** A team's share of the blocks is by weight, of the teams that have started sequences or new ones. Where KV
  stays, a sequence that would take its team beyond its share *gives way*: it does not start while a less served team
  has a new one within its own share. The holder of the reservation gives way to nobody.
* **Reservation** (docs/scheduling.md). The first sequence that was refused more than 16 times holds the one reservation
  until it fits; others start, or come back from the host, only beside it. One holder cannot deadlock, and a large head
  of the line cannot starve behind small sequences. Only sequences of the policy's `claimant` may hold it, and it is
  taken back from a team that is no longer the claimant. Who would have more than its team's share of the device holds
  it for a limited time: after `HELD_STEPS` steps in which no KV was moved for it, others get in until it was refused
  as often again. Each time the limit doubles, so one of them is long enough for all others to end.
* **Closed steps.** When not even the smallest new sequence fits, all are refused at once, so a full pool costs no more
  than an empty queue. Such a step counts as a refusal for each; the reservation then goes to the oldest.
"""

import heapq
import sys
from collections.abc import Collection, Iterable
from typing import Protocol

from engine.blocks import blocks_for
from engine.memory.holding import Place
from engine.request import Sequence
from policies.policy import Policy
from policies.sequences import TeamTerms

REFUSALS_BEFORE_RESERVATION = 16
# A few times the steps before it: blocks are kept for nothing most of the time, but answers that wait get in.
HELD_STEPS = 4 * REFUSALS_BEFORE_RESERVATION
_AWAY = (Place.GOING_OUT, Place.HOST)
_HALF_BLOCKS = 3, 4  # of the device's blocks: what half-computed prompts may come to by a team's second one


class ClaimRule(Protocol):
    """What a sequence must be able to have before it starts. Counts are blocks."""

    def claim(self, sequence: Sequence, num_to_fill: int) -> int:
        """Claimed by a sequence that starts and will fill `num_to_fill` blocks first."""

    is_lasting: bool  # what is claimed may not be taken back
    tried_max: int  # refused newcomers of a step after which the others may be refused unasked

    def counted(self, num: int) -> int:
        """`num` where the rule looks at the device's present state, else a number beyond any pool."""


class GrowingClaims:
    """KV can be taken back from paused sequences, so a claim grows with what its sequence holds."""

    is_lasting = False
    tried_max = 4  # enough for the planner to make room for the best of them

    def claim(self, sequence: Sequence, num_to_fill: int) -> int:
        return min(sequence.memory.num_blocks_max, num_to_fill + 1)

    def counted(self, num: int) -> int:
        return num


class WholeClaims:
    """KV stays until its sequence ends, so a claim is all that the sequence may ever hold."""

    is_lasting = True
    tried_max = sys.maxsize

    def claim(self, sequence: Sequence, num_to_fill: int) -> int:
        return sequence.memory.num_blocks_max

    def counted(self, num: int) -> int:
        return sys.maxsize


class Starts:
    """Owns the waiting line, the sum of claims and the reservation."""

    def __init__(self, rule: ClaimRule, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._rule = rule
        self.device_blocks = num_device_blocks
        self._capacity = num_device_blocks + num_host_blocks
        self._block_size = block_size
        self.waiting: dict[int, Sequence] = {}  # without a first step, in order of arrival
        self.waiting_of: dict[int, dict[int, Sequence]] = {}  # the same by team
        self.holder: Sequence | None = None  # of the reservation
        self.has_room_grown = False  # since it was last said who fits again
        self.is_short = False  # somebody was refused for blocks since this was last set back
        self.num_claimed = 0  # of all started sequences
        self._claimed_of: dict[int, int] = {}  # the same by team, of those that have any
        self._weights: dict[int, int] = {}  # of the teams in the table
        self.num_half = 0  # blocks of the whole prompts that are half computed, on the device or on the way back
        self.num_half_away = 0  # the same of those on the host or on the way there
        self._halves_of: dict[int, int] = {}  # half-computed prompts by team, of those that have any
        self.blocked_teams: set[int] = set()  # teams with sequences beside the line that wait for blocks
        self.kept = 0  # device blocks not for newcomers in this step: promised to half prompts, and the reserve
        self._needs: list[tuple[int, int]] = []  # heap of (num_claim, seq_id), also of sequences long started
        self._num_closed = 0  # steps in which nothing new fitted
        self.num_tried = 0  # newcomers of this step that only the device had no room for
        self._claimant: int | None = None  # of this step, once it is known; None is any team
        self._is_claimant_known = False
        self._num_vain = 0  # steps since the reservation was given, or KV was moved for its holder
        self._fair_order: list[int] | None = None  # teams with new sequences, the least served first, once it is known
        self._deadlines: list[tuple[int, int]] = []  # heap of (start_by_us, seq_id), also of sequences long started

    def add(self, sequence: Sequence) -> None:
        """A new one, at the end of the line."""
        self.resize(sequence)
        seq_id = sequence.seq_id
        sequence.memory.num_closed_before = self._num_closed
        self.waiting[seq_id] = sequence
        self.waiting_of.setdefault(sequence.request.team_id, {})[seq_id] = sequence
        heapq.heappush(self._needs, (sequence.memory.num_claim, seq_id))
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
            self._deadlines = [deadline for deadline in self._deadlines if deadline[1] in self.waiting]
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

    # -- shares ------------------------------------------------------------------------------------------------------

    def configure(self, teams: Iterable[TeamTerms]) -> None:
        """The table of teams is this from now on."""
        self._weights = {terms.team_id: terms.weight for terms in teams}

    def weight_of(self, team_id: int) -> int:
        """A team that left the table has weight 1."""
        return self._weights.get(team_id, 1)

    def claims_by_team(self, team_id: int) -> dict[int, int]:
        """Claims of started sequences, of `team_id` and every team that has started or new ones."""
        return {team_id: 0} | dict.fromkeys(self.waiting_of, 0) | self._claimed_of

    def share_of(self, team_id: int) -> int:
        """The team's part of the device's blocks by weight, rounded down, of the teams that have started sequences or
        new ones.
        """
        total = sum(map(self.weight_of, {team_id} | self.waiting_of.keys() | self._claimed_of.keys()))
        return self.device_blocks * self.weight_of(team_id) // total

    def exceeds_share(self, sequence: Sequence) -> bool:
        """Whether its team would claim more than its share of the device's blocks if it started, or does already."""
        team_id = sequence.request.team_id
        claimed = self._claimed_of.get(team_id, 0)
        if not sequence.memory.is_started:
            claimed += sequence.memory.num_claim
        return claimed > self.share_of(team_id)

    def _gives_way(self, sequence: Sequence) -> bool:
        """Whether a less served team has a new sequence within its share, and this one would be beyond its own."""
        order = self._fair_order
        if order is None or len(self.waiting_of) < 2 or not self.exceeds_share(sequence):
            return False
        for team_id in order:
            if team_id == sequence.request.team_id:
                return False
            line = self.waiting_of.get(team_id)
            if line and not self.exceeds_share(next(iter(line.values()))):
                return True
        return False

    # -- the line ----------------------------------------------------------------------------------------------------

    def begin(self, policy: Policy, refused: list[Sequence], free: int) -> bool:
        """A step is being picked. Is it closed?"""
        self.num_tried = 0
        self._is_claimant_known = False
        if self.holder is not None:
            self._look_at_holder(policy, self.holder, free)
        self._fair_order = None
        if self._rule.is_lasting and len(self.waiting_of) > 1 and self._find_claimant(policy) is not None:
            self._fair_order = policy.over_served(self.waiting_of)[::-1]
        return self.close_if_full(policy, refused, free)

    def _look_at_holder(self, policy: Policy, holder: Sequence, free: int) -> None:
        """Take the reservation from a sequence that may not have it any longer."""
        self._num_vain += 1
        may_stay = self._may_hold(policy, holder) and not self._waits_for_own(holder)
        memory = holder.memory
        if may_stay and self._num_vain > HELD_STEPS << memory.num_held and self.exceeds_share(holder):
            may_stay = not memory.is_started and self.fits(holder, free)
            if not may_stay:
                memory.num_held += 1
                memory.num_refusals = 0
                memory.num_closed_before = self._num_closed
        if not may_stay:
            self.holder = None
            self.has_room_grown = True

    def note_progress(self) -> None:
        """KV was moved for the holder."""
        self._num_vain = 0

    def close_if_full(self, policy: Policy, refused: list[Sequence], free: int) -> bool:
        """Refuse all new sequences at once when not even the smallest fits. This step has `refused` some before."""
        needs, waiting = self._needs, self.waiting
        while needs and needs[0][1] not in waiting:
            heapq.heappop(needs)
        if not needs or not waiting:
            return False
        holder = self.holder
        reserved = holder.memory.num_claim if holder is not None and not holder.memory.is_started else 0
        room = self._capacity - self.num_claimed - reserved
        room = min(room, self._rule.counted(self.device_blocks - self.num_half + 1))
        is_shut = needs[0][0] > room
        if not is_shut and self.is_tried_enough:
            held = holder.memory.num_wanted if holder is not None else 0
            is_shut = needs[0][0] > self._rule.counted(free - self.kept - held)
        if not is_shut or (holder is not None and not holder.memory.is_started and self.fits(holder, free)):
            return False
        policy.refuse_new()
        self.is_short = True
        self._num_closed += 1
        for sequence in refused:
            sequence.memory.num_refusals -= 1  # a step counts once
        if self.holder is None:
            claimant = self._find_claimant(policy)
            line = waiting if claimant is None else self.waiting_of.get(claimant)
            if line:
                self._reserve_for(policy, next(iter(line.values())))
        return True

    def announce(self, kept: int, blocked_teams: Iterable[int]) -> None:
        """Before a step is picked: `kept` blocks are not for newcomers, and sequences of these teams wait for
        blocks.
        """
        self.kept = kept
        self.blocked_teams = set(blocked_teams)

    def note_blocked(self, team_id: int) -> None:
        """A started or dropped sequence of this team was refused."""
        self.blocked_teams.add(team_id)

    def note_room(self) -> None:
        """Blocks may have come free since it was last said who fits again."""
        self.has_room_grown = True

    def use_kept(self, num_blocks: int) -> None:
        """A half-computed prompt took blocks that were kept for it."""
        self.kept -= num_blocks

    def end_reservation(self, sequence: Sequence) -> None:
        """`sequence` has what it waited for."""
        sequence.memory.num_refusals = 0
        if self.holder is sequence:
            self.holder = None

    def take_shortage(self, is_wide: bool) -> bool:
        """Whether a sequence was refused for blocks since the last call, or lags were wide then; `is_wide` is now."""
        was_short, self.is_short = self.is_short or is_wide, is_wide
        return was_short

    @property
    def is_tried_enough(self) -> bool:
        """So many newcomers were refused that the others may be, unasked."""
        return self.num_tried >= self._rule.tried_max

    def room_at_most(self, free: int) -> int:
        """What claims more starts neither now nor later in this step; with `free` device blocks."""
        return min(self._capacity - self.num_claimed, self._rule.counted(free))

    def is_held_back(self, sequence: Sequence) -> bool:
        """Whether a new sequence must wait for prompts of its own team.

        A team that has a half-computed prompt starts another only while all half-computed prompts come to at most
        three quarters of the device's blocks. The last quarter is for the first prompts of other teams: half-computed
        prompts are never dropped, so without it one team's long prompts would keep out everybody else's.
        """
        if not self._halves_of.get(sequence.request.team_id):
            return False
        part, whole = _HALF_BLOCKS
        most = self._rule.counted(self.device_blocks * part // whole)
        return self.num_half + self.num_half_away + self._num_to_fill(sequence) > most

    def fits(self, sequence: Sequence, free: int) -> bool:
        """Whether one that is not started may start now, with `free` device blocks."""
        holder = self.holder
        if not self.may_claim(sequence) or (holder is not sequence and self._gives_way(sequence)):
            return False
        kept = self.kept
        if holder is sequence:
            kept = min(kept, self.num_half)
        elif holder is not None:
            kept += holder.memory.num_wanted
        return sequence.memory.num_claim <= self._rule.counted(free - kept)

    def may_claim(self, sequence: Sequence) -> bool:
        """Whether its claim fits beside all others', whatever is free on the device."""
        return self.may_claim_without(sequence, ())

    def may_claim_without(self, sequence: Sequence, going: Iterable[Sequence]) -> bool:
        """The same if these half-computed prompts were not on the device, which they are."""
        holder = self.holder
        reserved = 0
        if holder is not None and holder is not sequence and not holder.memory.is_started:
            reserved = holder.memory.num_claim
        if self.num_claimed + reserved + sequence.memory.num_claim > self._capacity:
            return False
        num_half = self.num_half - sum(map(self._num_to_fill, going))
        return num_half + self._num_to_fill(sequence) <= self._rule.counted(self.device_blocks)

    def start(self, sequence: Sequence) -> None:
        """It fits, and starts."""
        if self.holder is sequence:
            self.holder = None
        self._claim(sequence, sequence.memory.num_claim)
        whole = self._num_to_fill(sequence)
        self.num_half += whole
        team_id = sequence.request.team_id
        self._halves_of[team_id] = self._halves_of.get(team_id, 0) + 1
        self.kept += whole
        sequence.memory.num_refusals = sequence.memory.num_held = 0
        if sequence.memory.place is Place.NOWHERE:
            self._forget_waiting(sequence)

    def grown(self, sequence: Sequence, num_blocks: int) -> None:
        """A started sequence holds so many blocks now, and claims one more while it may need it."""
        claim = self._rule.claim(sequence, num_blocks)
        if claim > sequence.memory.num_claimed:
            self._claim(sequence, claim)

    def went_out(self, sequence: Sequence) -> None:
        """A started sequence leaves the device. Its prompt, if it is half computed, waits on the host."""
        if sequence.is_half:
            self.num_half -= self._num_to_fill(sequence)
            self.num_half_away += self._num_to_fill(sequence)

    def comes_back(self, sequence: Sequence) -> None:
        """A started sequence has blocks on the device again, for its whole prompt."""
        if sequence.is_half:
            self.num_half += self._num_to_fill(sequence)
            self.num_half_away -= self._num_to_fill(sequence)

    def filled(self, sequence: Sequence) -> None:
        """The prompt (or what had to be computed again) is whole."""
        if sequence.memory.place in _AWAY:
            self.num_half_away -= self._num_to_fill(sequence)
        else:
            self.num_half -= self._num_to_fill(sequence)
        team_id = sequence.request.team_id
        self._halves_of[team_id] -= 1
        if not self._halves_of[team_id]:
            del self._halves_of[team_id]

    def leave(self, sequence: Sequence) -> None:
        """It has ended, or its KV was dropped: its claim is free."""
        if sequence.memory.place is Place.NOWHERE:
            self._forget_waiting(sequence)
        else:
            if sequence.memory.num_claimed and sequence.is_half:
                self.filled(sequence)
            self._claim(sequence, 0)
        self.has_room_grown = True
        if self.holder is sequence:
            self.holder = None

    def refuse(self, policy: Policy, sequence: Sequence) -> None:
        """It was refused for blocks."""
        self.is_short = True
        sequence.memory.num_refusals += 1
        self.num_tried += not sequence.memory.num_claimed  # it is not started
        if self.holder is None:
            self._reserve_for(policy, sequence)

    def say_who_fits_again(self, policy: Policy, free: int) -> None:
        """When room has grown, the policy hears of each team's oldest refused sequence that would fit now. A policy
        that thought the team unable to run would otherwise never try it again behind others of better levels.
        """
        self.has_room_grown = False
        holder = self.holder
        room = self._capacity - self.num_claimed  # for one that is not the holder, at most
        room = min(room, self._rule.counted(free - self.kept - (holder.memory.num_wanted if holder is not None else 0)))
        for line in self.waiting_of.values():
            oldest = next(iter(line.values()))
            if oldest.memory.num_claim > room and oldest is not holder:
                continue
            if (oldest.memory.num_refusals or self._num_closed > oldest.memory.num_closed_before) and self.fits(
                oldest, free
            ):
                policy.fits_again(oldest.seq_id)

    def check(self, live: Collection[Sequence]) -> None:
        """Assert that claims and lines agree with the sequences."""
        started = [s for s in live if s.memory.is_started]
        assert self.num_claimed == sum(s.memory.num_claimed for s in started)
        assert not any(
            s.memory.num_claimed or s.memory.table.blocks or s.memory.table.host
            for s in live
            if not s.memory.is_started
        )
        assert len(self.waiting) == sum(s.memory.place is Place.NOWHERE for s in live)
        assert len(self.waiting) == sum(len(line) for line in self.waiting_of.values())
        assert all(len(s.memory.table.blocks) <= s.memory.num_blocks_max for s in started)
        halves = [s for s in started if s.is_half]
        assert self.num_half_away == sum(self._num_to_fill(s) for s in halves if s.memory.place in _AWAY)
        assert self.num_half == sum(self._num_to_fill(s) for s in halves) - self.num_half_away
        assert self.num_claimed == sum(self._claimed_of.values()) and all(self._claimed_of.values())
        assert sum(self._halves_of.values()) == sum(s.is_half for s in started)
        assert all(s.memory.num_claimed <= self._rule.claim(s, s.memory.num_blocks_max) for s in started)

    def resize(self, sequence: Sequence) -> None:
        """What it claims when it starts: for a new sequence, and for one that lost its KV."""
        memory = sequence.memory
        memory.num_claim = memory.num_wanted = self._rule.claim(sequence, self._num_to_fill(sequence))

    def _find_claimant(self, policy: Policy) -> int | None:
        """Whose sequences may hold the reservation in this step; asked only when somebody might."""
        if not self._is_claimant_known:
            self._is_claimant_known = True
            holding = self.holder.request.team_id if self.holder is not None else None
            teams = {*self.waiting_of, *self.blocked_teams, *(() if holding is None else (holding,))}
            self._claimant = policy.claimant(teams, holding)
        return self._claimant

    def _may_hold(self, policy: Policy, sequence: Sequence) -> bool:
        return self._find_claimant(policy) in (None, sequence.request.team_id)

    def _waits_for_own(self, sequence: Sequence) -> bool:
        """It is new, and prompts of its own team keep it back, so it has no use for blocks yet."""
        return sequence.memory.place is Place.NOWHERE and self.is_held_back(sequence)

    def _reserve_for(self, policy: Policy, sequence: Sequence) -> None:
        """Give the free reservation to a sequence that was refused often enough, if its team may hold it."""
        num_refusals = sequence.memory.num_refusals
        if sequence.memory.place is Place.NOWHERE:
            num_refusals += self._num_closed - sequence.memory.num_closed_before
        if (
            num_refusals > REFUSALS_BEFORE_RESERVATION
            and not self._waits_for_own(sequence)
            and self._may_hold(policy, sequence)
        ):
            self.holder = sequence
            self._num_vain = 0
            self.has_room_grown = True  # for the holder

    def _num_to_fill(self, sequence: Sequence) -> int:
        return blocks_for(sequence.num_to_fill, self._block_size)

    def _claim(self, sequence: Sequence, num_blocks: int) -> None:
        """It claims so much from now on."""
        more, team_id = num_blocks - sequence.memory.num_claimed, sequence.request.team_id
        sequence.memory.num_claimed = num_blocks
        self.num_claimed += more
        claimed = self._claimed_of[team_id] = self._claimed_of.get(team_id, 0) + more
        if not claimed:
            del self._claimed_of[team_id]

    def _forget_waiting(self, sequence: Sequence) -> None:
        del self.waiting[sequence.seq_id]
        team_id = sequence.request.team_id
        line = self.waiting_of[team_id]
        del line[sequence.seq_id]
        if not line:
            del self.waiting_of[team_id]
