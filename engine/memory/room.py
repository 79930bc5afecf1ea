"""The room that one set of moves makes: who goes, who loses its KV, and what is free meanwhile.

For `engine.memory.planner`, which says for whom and under which guards. Each way to make room has its method:

| method | who may go | when not all can be freed | may drop KV where it could be swapped |
|---|---|---|---|
| `make_room_for_growth` | those that rank behind | what the link has room for goes | yes |
| `make_room_for_holder` | those that rank behind | what the link has room for goes | no |
| `make_room_for_claim` | of these, those whose move pays (G1) | nobody goes | no |
| `make_room_ahead` | the idle ones whose move pays (G1) | the others go | no |
| `make_room_at_any_cost` | everybody, whatever the guards say | nobody goes | yes |

The leader goes, after all others, for the holder of the reservation alone, and only if the gate would hold its team
back for the holder's.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine.memory.moves import Away, Holder, Move, Need, Pools, Resident
from policies.sequences import Turn

_NOBODY = -2  # no sequence's id, and not -1, which is room for no sequence in particular


class Costs(Protocol):
    """What the planner knows of a move's worth."""

    gamma: int
    can_swap: bool

    def copy_us(self, num_blocks: int, /) -> int:
        """Of so many blocks, one way."""

    def pays(self, enst_us: int, num_dirty: int, num_blocks: int) -> bool:
        """G1."""


@dataclass(frozen=True, slots=True)
class _Payer:
    """The team that pays for moves, and the sequence that they make room for; -1 is no sequence in particular."""

    team_id: int
    for_seq: int


@dataclass(slots=True)
class _Choice:
    """Who is to go, before anything is booked."""

    host_room: int  # host blocks that moves out may still take
    chosen: list[Resident] = field(default_factory=list)  # moved out; where KV cannot be swapped, it is dropped
    dropped: list[Resident | Away] = field(default_factory=list)  # lose their KV because the host is full
    freed: int = 0  # device blocks
    is_link_short: bool = False  # a victim was passed over, because the link has no room for its copy now

    def move(self, victim: Resident) -> None:
        """It goes."""
        self.chosen.append(victim)
        self.host_room -= victim.num_new_host
        self.freed += victim.num_blocks

    def drop(self, loser: Resident | Away) -> None:
        """Its KV goes, from the device or from the host."""
        self.dropped.append(loser)
        if isinstance(loser, Resident):
            self.freed += loser.num_blocks
        else:
            self.host_room += loser.num_blocks

    def trim(self, missing: int) -> None:
        """Let those stay that a later, larger victim made needless."""
        for victim in list(self.chosen):
            if self.freed - victim.num_blocks >= missing:
                self.chosen.remove(victim)
                self.freed -= victim.num_blocks
        for loser in self.dropped_residents:
            if self.freed - loser.num_blocks >= missing:
                self.dropped.remove(loser)
                self.freed -= loser.num_blocks

    @property
    def dropped_residents(self) -> list[Resident]:
        """Those that lose their KV on the device."""
        return [loser for loser in self.dropped if isinstance(loser, Resident)]

    @property
    def dropped_away(self) -> list[Away]:
        """Those that lose their KV on the host."""
        return [loser for loser in self.dropped if isinstance(loser, Away)]


class Room:
    """What is free, and who may be moved out, while one set of moves is put together."""

    def __init__(
        self,
        planner: Costs,
        pools: Pools,
        residents: Sequence[Resident],
        away: Sequence[Away],
        turns: Sequence[Turn],
        over_served: Callable[[Collection[int]], Sequence[int]],
        holder: Holder | None = None,
    ) -> None:
        self.pools = pools
        self.free, self.incoming, self.host_free, self.link_us = (
            pools.free,
            pools.incoming,
            pools.host_free,
            pools.link_us,
        )
        self.moves: list[Move] = []
        self.away = {sequence.seq_id: sequence for sequence in away}
        self.spared: set[int] = set()  # those room was made for
        self.gone: set[int] = set()  # those that were moved
        self._planner = planner
        self._rank = {turn.seq_id: rank for rank, turn in enumerate(turns)}
        self._enst = {turn.seq_id: turn.enst_us for turn in turns}
        self._over_served = over_served
        self._holder = holder if holder is not None else Holder(_NOBODY)
        # Latest turn first; half-prefilled ones after the others, and what needs no copy before what does.
        rank = self._rank
        self._victims = sorted(
            residents,
            key=lambda victim: (not victim.is_whole, victim.num_dirty > 0, -rank.get(victim.seq_id, -1)),
        )
        leader = max(residents, key=lambda resident: (resident.attained_us, -resident.seq_id), default=None)
        self._leader = leader.seq_id if leader is not None else None

    @property
    def may_copy(self) -> bool:
        """G3."""
        return self.link_us > 0

    def use_link(self, num_blocks: int) -> None:
        self.link_us -= self._planner.copy_us(num_blocks)

    def take(self, num_blocks: int) -> None:
        """Keep blocks for a sequence that was served; what is not there yet comes from the blocks on their way."""
        now = min(num_blocks, max(0, self.free))
        self.free -= now
        self.incoming -= num_blocks - now

    # -- for whom ----------------------------------------------------------------------------------------------------

    def make_room_for_growth(self, missing: int, need: Need) -> bool:
        """Free `missing` blocks for a sequence that has a slot. False: they are not all free, but a part may be."""
        victims = self._behind(need.seq_id)
        if not _has_blocks(victims, missing):
            return False
        choice = self._choose(victims, missing)
        if choice.freed < missing and not choice.is_link_short:
            self._drop_some(choice, victims, missing)
        return self._commit_what_fits(choice, missing, need)

    def make_room_for_holder(self, missing: int, need: Need) -> bool:
        """Free `missing` blocks for the holder of the reservation. False: not all, but a part may be free."""
        victims = self._behind(need.seq_id)
        if not _has_blocks(victims, missing):
            return False
        return self._commit_what_fits(self._choose(victims, missing), missing, need)

    def make_room_for_claim(self, missing: int, need: Need) -> bool:
        """Free `missing` blocks for a newcomer or an upload, or move nobody."""
        victims = self._worth_moving(self._behind(need.seq_id))
        if not _has_blocks(victims, missing):
            return False
        choice = self._choose(victims, missing)
        if choice.freed < missing:
            return False
        self._commit(choice, missing, need.team_id, need.seq_id)
        return True

    def make_room_ahead(self, missing: int, team_id: int | None) -> None:
        """Free up to `missing` blocks that nobody waits for yet. Without `team_id` the first victim's team pays."""
        victims = [victim for victim in self._worth_moving(self._behind(-1)) if victim.is_idle]
        self._commit(self._choose(victims, missing), missing, team_id, -1)

    def make_room_at_any_cost(self, missing: int, need: Need) -> bool:
        """Free `missing` blocks when nothing can run. The link's budget is no bound then: `pools.link_us` is huge."""
        victims = [victim for victim in self._victims if victim.seq_id not in self.spared]
        if not _has_blocks(victims, missing):
            return False
        choice = self._choose(victims, missing)
        if choice.freed < missing:
            self._drop_some(choice, victims, missing)
        return self._commit_what_fits(choice, missing, need)

    # -- who goes ----------------------------------------------------------------------------------------------------

    def _behind(self, for_seq: int) -> list[Resident]:
        """Who may be moved out for `for_seq`, in the order they go: who ranks behind it and is not safe (G2, G6)."""
        after = self._rank.get(for_seq, -1)
        is_link_used_up = self._planner.can_swap and not self.may_copy
        behind = [
            victim
            for victim in self._victims
            if victim.seq_id not in self.spared
            and not victim.is_protected
            and self._rank[victim.seq_id] >= after
            and not (is_link_used_up and victim.num_dirty)
        ]
        leader = next((victim for victim in behind if victim.seq_id == self._leader), None)
        if leader is not None:
            behind.remove(leader)
            if for_seq == self._holder.seq_id and leader.team_id in self._holder.ahead:
                behind.append(leader)
        return behind

    def _worth_moving(self, victims: list[Resident]) -> list[Resident]:
        """G1."""
        return [victim for victim in victims if self._pays(victim, self._enst[victim.seq_id])]

    def _pays(self, victim: Resident, enst_us: int) -> bool:
        if self._planner.can_swap:
            return self._planner.pays(enst_us, victim.num_dirty, victim.num_blocks)
        return enst_us >= self._planner.gamma * victim.replay_us

    def _choose(self, victims: list[Resident], missing: int) -> _Choice:
        """The first of `victims` that free `missing` blocks together, or as many as can go."""
        choice = _Choice(self.host_free + self._spare_host(victims))
        for victim in victims:
            if choice.freed >= missing:
                break
            if not self._planner.can_swap:
                if victim.is_whole:
                    choice.move(victim)
            elif victim.num_new_host <= choice.host_room:
                if self._may_copy_beside(choice.chosen, victim):
                    choice.move(victim)
                else:
                    choice.is_link_short = True
        return choice

    def _may_copy_beside(self, chosen: list[Resident], victim: Resident) -> bool:
        """G3: one copy may overdraw the link's budget, a second one may not."""
        if not victim.num_dirty:
            return True
        return self.link_us > sum(self._planner.copy_us(other.num_dirty) for other in chosen)

    def _spare_host(self, victims: Collection[Resident]) -> int:
        """Host blocks of clean copies whose sequences stay on the device."""
        return sum(keeper.num_host for keeper in self._keepers(victims))

    def _keepers(self, victims: Collection[Resident]) -> list[Resident]:
        going = {victim.seq_id for victim in victims}
        return [resident for resident in self._victims if resident.num_host and resident.seq_id not in going]

    def _drop_some(self, choice: _Choice, victims: list[Resident], missing: int) -> None:
        """The host has no room: who loses its KV, the fewest computed tokens among the most over-served teams first.

        Dropping KV on the host makes room there, so that another sequence can be moved out.
        """
        if not self._planner.can_swap:
            return
        whole: list[Resident | Away] = [victim for victim in victims if victim.is_whole and victim not in choice.chosen]
        whole += [away for away in self.away.values() if away.is_whole and away.seq_id not in self.spared]
        teams = self._over_served({loser.team_id for loser in whole})
        order = {team_id: rank for rank, team_id in enumerate(teams)}
        for loser in sorted(whole, key=lambda loser: (order[loser.team_id], loser.num_computed, loser.seq_id)):
            if choice.freed >= missing:
                break
            if loser in choice.chosen:
                continue
            choice.drop(loser)
            if isinstance(loser, Away):
                self._fill_host(choice, victims, missing)

    def _fill_host(self, choice: _Choice, victims: list[Resident], missing: int) -> None:
        """The host has room again: move out who fits there."""
        for victim in victims:
            if choice.freed >= missing:
                break
            if victim in choice.chosen or victim in choice.dropped or victim.num_new_host > choice.host_room:
                continue
            if self._may_copy_beside(choice.chosen, victim):
                choice.move(victim)

    # -- what is booked ----------------------------------------------------------------------------------------------

    def _commit_what_fits(self, choice: _Choice, missing: int, need: Need) -> bool:
        """Book the choice if it frees all that is missing, or if the others go when the link is free again."""
        if choice.freed >= missing or choice.is_link_short:
            self._commit(choice, missing, need.team_id, need.seq_id)
        return choice.freed >= missing

    def _commit(self, choice: _Choice, missing: int, team_id: int | None, for_seq: int) -> None:
        """Book the choice, less what is needless. Without `team_id` the team of the first that goes pays."""
        if not (choice.chosen or choice.dropped):
            return
        choice.trim(missing)
        payer = _Payer((choice.chosen or choice.dropped)[0].team_id if team_id is None else team_id, for_seq)
        going = {victim.seq_id for victim in choice.chosen} | {loser.seq_id for loser in choice.dropped}
        self.gone |= going
        num_wanted = sum(victim.num_new_host for victim in choice.chosen) if self._planner.can_swap else 0
        self._keep_needless(choice, num_wanted)
        self._book_drops(choice.dropped, payer)
        forgotten = self._forget_copies([*choice.chosen, *choice.dropped_residents], num_wanted, payer)
        self._book_moves(choice.chosen, payer)
        self._victims = [
            msgspec.structs.replace(victim, num_host=0, num_dirty=victim.num_blocks)
            if victim.seq_id in forgotten
            else victim
            for victim in self._victims
            if victim.seq_id not in going
        ]

    def _keep_needless(self, choice: _Choice, num_wanted: int) -> None:
        """Let those on the host keep their KV whose room there nobody uses."""
        on_host = choice.dropped_away
        for loser in list(on_host):
            rest = sum(other.num_blocks for other in on_host if other is not loser)
            if self.host_free + self._spare_host(choice.chosen) + rest >= num_wanted:
                on_host.remove(loser)
                choice.dropped.remove(loser)

    def _book_drops(self, dropped: list[Resident | Away], payer: _Payer) -> None:
        for loser in dropped:
            self._book("drop", loser, payer)
            if isinstance(loser, Away):
                self.host_free += loser.num_blocks
                del self.away[loser.seq_id]
            else:
                self.free += loser.num_blocks
                self.host_free += loser.num_host

    def _forget_copies(self, going: list[Resident], num_wanted: int, payer: _Payer) -> set[int]:
        """Give up clean host copies of sequences that stay, until `num_wanted` host blocks are free. Returns whose."""
        forgotten = set()
        # The latest turn first would be the next to go out: its copy is worth the most.
        for keeper in sorted(self._keepers(going), key=lambda keeper: self._rank.get(keeper.seq_id, -1)):
            if self.host_free >= num_wanted:
                break
            self._book("forget", keeper, payer)
            self.host_free += keeper.num_host
            forgotten.add(keeper.seq_id)
        return forgotten

    def _book_moves(self, chosen: list[Resident], payer: _Payer) -> None:
        for victim in chosen:
            if self._planner.can_swap:
                self._book("out", victim, payer)
                self.host_free -= victim.num_new_host
                self.use_link(victim.num_dirty)
                self.free += victim.num_blocks - victim.num_dirty
                self.incoming += victim.num_dirty
            else:
                self._book("drop", victim, payer)
                self.free += victim.num_blocks

    def _book(self, kind: str, sequence: Resident | Away, payer: _Payer) -> None:
        """A team that is ahead and holds more than its share of the blocks pays itself for what goes for the holder."""
        team_id = payer.team_id
        if payer.for_seq == self._holder.seq_id and sequence.team_id in self._holder.large:
            team_id = sequence.team_id
        self.moves.append(Move(kind, sequence.seq_id, team_id, payer.for_seq))


def _has_blocks(victims: Collection[Resident], missing: int) -> bool:
    """Whether `victims` hold so many blocks at all."""
    return sum([victim.num_blocks for victim in victims]) >= missing
