"""The room that one set of moves makes: who goes, who loses its KV, and what is free meanwhile.

For `engine.memory.planner`, which says for whom and under which guards.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from engine.memory.moves import Away, Move, Pools, Resident
from policies.sequences import Turn


class Costs(Protocol):
    """What the planner knows of a move's worth."""

    gamma: int
    can_swap: bool

    def copy_us(self, num_blocks: int, /) -> int:
        """Of so many blocks, one way."""

    def pays(self, enst_us: int, num_dirty: int, num_blocks: int) -> bool:
        """G1."""


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
        *,
        is_forced: bool = False,
    ) -> None:
        self.pools = pools
        self.free, self.incoming, self.host_free, self.link_us = (
            pools.free,
            pools.incoming,
            pools.host_free,
            pools.link_us,
        )
        self.moves: list[Move] = []
        self.away = {one.seq_id: one for one in away}
        self.is_forced = is_forced
        self.spared: set[int] = set()  # those room was made for
        self.gone: set[int] = set()  # those that were moved
        self._planner = planner
        self._rank = {turn.seq_id: rank for rank, turn in enumerate(turns)}
        self._enst = {turn.seq_id: turn.enst_us for turn in turns}
        self._over_served = over_served
        # Latest turn first; half-prefilled ones after the others, and what needs no copy before what does.
        rank = self._rank
        self._victims = sorted(
            residents, key=lambda one: (not one.is_whole, one.num_dirty > 0, -rank.get(one.seq_id, -1))
        )
        leader = max(residents, key=lambda one: (one.attained_us, -one.seq_id), default=None)
        self._leader = leader.seq_id if leader is not None else None

    @property
    def may_copy(self) -> bool:
        """G3."""
        return self.is_forced or self.link_us > 0

    def use_link(self, num_blocks: int) -> None:
        self.link_us -= self._planner.copy_us(num_blocks)

    def take(self, num_blocks: int) -> None:
        """Keep blocks for one that was served; what is not there yet comes from the blocks on their way."""
        now = min(num_blocks, max(0, self.free))
        self.free -= now
        self.incoming -= num_blocks - now

    def clear(
        self,
        missing: int,
        *,
        for_seq: int,
        team_id: int | None,
        is_g1: bool = True,
        may_drop: bool = False,
        is_ahead: bool = False,
    ) -> bool:
        """Move out the fewest that free `missing` blocks, or nobody when that cannot be done. For `for_seq` only those
        go that run after it. `is_ahead`: nobody waits for it yet, so only idle ones go, and fewer blocks will do.
        """
        victims = self._candidates(for_seq, is_g1=is_g1)
        if is_ahead:
            victims = [victim for victim in victims if victim.is_idle]
        elif sum([victim.num_blocks for victim in victims]) < missing:
            return False
        host_room = self.host_free + self._spare_host(victims)
        chosen: list[Resident] = []
        dropped: list[Resident | Away] = []
        freed = 0
        is_link_short = False
        for victim in victims:
            if freed >= missing:
                break
            if self._planner.can_swap:
                if victim.num_new_host > host_room:
                    continue
                if not self._may_copy_beside(chosen, victim):
                    is_link_short = True
                    continue
                host_room -= victim.num_new_host
            elif not victim.is_whole:
                continue
            chosen.append(victim)
            freed += victim.num_blocks
        if freed < missing and may_drop and self._planner.can_swap and not is_link_short:
            freed += self._drop_some(missing - freed, victims, chosen, dropped, host_room)
        is_partial = is_ahead or (is_link_short and not is_g1)  # the others go when the link is free again
        if not (chosen or dropped) or (freed < missing and not is_partial):
            return False
        for victim in list(chosen):  # earlier ones that a later, larger one made needless
            if freed - victim.num_blocks >= missing:
                chosen.remove(victim)
                freed -= victim.num_blocks
        if freed >= missing:
            for loser in [loser for loser in dropped if isinstance(loser, Resident)]:
                if freed - loser.num_blocks >= missing:
                    dropped.remove(loser)
                    freed -= loser.num_blocks
        payer = team_id if team_id is not None else (chosen or dropped)[0].team_id
        self._commit(chosen, dropped, payer, for_seq)
        return freed >= missing

    def _candidates(self, for_seq: int, *, is_g1: bool) -> list[Resident]:
        """Who may be moved out for `for_seq`, in the order they go. -1: for nobody in particular."""
        after = self._rank.get(for_seq, -1)
        planner, enst = self._planner, self._enst
        found = []
        for one in self._victims:
            if one.seq_id in self.spared:
                continue
            if not self.is_forced:
                if one.is_protected or one.seq_id == self._leader or self._rank[one.seq_id] < after:
                    continue
                if planner.can_swap and not self.may_copy and one.num_dirty:
                    continue
                if is_g1 and not self._pays(one, enst[one.seq_id]):
                    continue
            found.append(one)
        return found

    def _pays(self, one: Resident, enst_us: int) -> bool:
        if self._planner.can_swap:
            return self._planner.pays(enst_us, one.num_dirty, one.num_blocks)
        return enst_us >= self._planner.gamma * one.replay_us

    def _spare_host(self, victims: Collection[Resident]) -> int:
        """Host blocks of clean copies whose sequences stay on the device."""
        return sum(one.num_host for one in self._keepers(victims))

    def _keepers(self, victims: Collection[Resident]) -> list[Resident]:
        going = {one.seq_id for one in victims}
        return [one for one in self._victims if one.num_host and one.seq_id not in going]

    def _may_copy_beside(self, chosen: list[Resident], victim: Resident) -> bool:
        """G3: one copy may overdraw the link's budget, a second one may not."""
        if self.is_forced or not victim.num_dirty:
            return True
        return self.link_us > sum(self._planner.copy_us(one.num_dirty) for one in chosen)

    def _drop_some(
        self,
        missing: int,
        victims: list[Resident],
        chosen: list[Resident],
        dropped: list["Resident | Away"],
        host_room: int,
    ) -> int:
        """The host has no room: who loses its KV, the fewest computed tokens among the most over-served teams first.

        Dropping one on the host makes room there, so that another can be moved out. Returns the device blocks freed.
        """
        whole: list[Resident | Away] = [one for one in victims if one.is_whole and one not in chosen]
        whole += [one for one in self.away.values() if one.is_whole and one.seq_id not in self.spared]
        order = {team_id: rank for rank, team_id in enumerate(self._over_served({one.team_id for one in whole}))}
        freed = 0
        for one in sorted(whole, key=lambda one: (order[one.team_id], one.num_computed, one.seq_id)):
            if freed >= missing:
                break
            if one in chosen:
                continue
            dropped.append(one)
            if isinstance(one, Resident):
                freed += one.num_blocks
                continue
            host_room += one.num_blocks
            for victim in victims:
                if victim in chosen or victim in dropped or victim.num_new_host > host_room or freed >= missing:
                    continue
                if not self._may_copy_beside(chosen, victim):
                    continue
                host_room -= victim.num_new_host
                chosen.append(victim)
                freed += victim.num_blocks
        return freed

    def _commit(self, chosen: list[Resident], dropped: list["Resident | Away"], team_id: int, for_seq: int) -> None:
        going = {one.seq_id for one in chosen} | {one.seq_id for one in dropped}
        wanted = sum(one.num_new_host for one in chosen) if self._planner.can_swap else 0
        on_host = [one for one in dropped if isinstance(one, Away)]
        for back in list(on_host):  # those whose room on the host nobody uses
            rest = sum(other.num_blocks for other in on_host if other is not back)
            if self.host_free + self._spare_host(chosen) + rest >= wanted:
                on_host.remove(back)
                dropped.remove(back)
        for loser in dropped:
            self.moves.append(Move("drop", loser.seq_id, team_id, for_seq))
            if isinstance(loser, Away):
                self.host_free += loser.num_blocks
                del self.away[loser.seq_id]
            else:
                self.free += loser.num_blocks
                self.host_free += loser.num_host
        self.gone |= going
        forgotten = set()
        # The latest turn first would be the next to go out: its copy is worth the most.
        for one in sorted(
            self._keepers([*chosen, *(d for d in dropped if isinstance(d, Resident))]),
            key=lambda one: self._rank.get(one.seq_id, -1),
        ):
            if self.host_free >= wanted:
                break
            self.moves.append(Move("forget", one.seq_id, team_id, for_seq))
            self.host_free += one.num_host
            forgotten.add(one.seq_id)
        for one in chosen:
            if self._planner.can_swap:
                self.moves.append(Move("out", one.seq_id, team_id, for_seq))
                self.host_free -= one.num_new_host
                self.use_link(one.num_dirty)
                self.free += one.num_blocks - one.num_dirty
                self.incoming += one.num_dirty
            else:
                self.moves.append(Move("drop", one.seq_id, team_id, for_seq))
                self.free += one.num_blocks
        self._victims = [
            msgspec.structs.replace(one, num_host=0, num_dirty=one.num_blocks) if one.seq_id in forgotten else one
            for one in self._victims
            if one.seq_id not in going
        ]
