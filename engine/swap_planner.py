"""Which sequences give up their device blocks, and which get theirs back. Values in, moves out; no block is touched.

FastServe's proactive swapping (arXiv 2305.05920, section on KV swapping), made fair between teams: everything goes by
`Turn`, the time until a sequence will probably run next (ENST), which the policy knows. Those that run late are moved
out first, and a team that is locked out of its share runs late. Those that run soon are brought back before their turn.

Guards, each against a way to thrash (docs/scheduling.md, "What may be moved out"):

* G1 a move out must pay: the turn is at least gamma round trips of its own copies away. Growth of a sequence that
  already holds its KV is exempt, for it has a slot that would stay empty, but may only move out what ranks behind it.
* G2 m steps after an upload are safe, and so is (G6) the *leader*, the resident sequence with the most work behind it.
* G3 the link's budget. G4 blocks kept free for the growth of the next steps. G5 gamma and m double when more than a
  tenth of the uploads are moved out again soon, and fall back slowly. G7 what comes back early must leave twice the
  reserve, what goes out leaves once.

When nothing at all could run, `force` makes room whatever the guards say: the sequence that runs last goes first.
When the host is full too, the fully prefilled sequence with the fewest computed tokens among the most over-served teams
drops its KV (docs/architecture.md), for growth and in `force` only; `engine.swapping` drops more, where the claims of
all leave the reservation's holder none. A half-prefilled sequence is never dropped.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum

import msgspec

from policies.sequences import Turn

AIMD_UPLOADS = 32  # uploads over which G5 counts
GAMMA_MAX = 64
FAILURES_MAX = 8  # needs, other than growth, that no room is found for, before a plan gives up on those behind them
LEAD_STEPS = 2  # an upload may start this many steps before it must


class Kind(StrEnum):
    """What a sequence needs blocks for."""

    GROW = "grow"  # it has KV on the device and cannot take its next tokens
    UPLOAD = "upload"  # its KV is on the host
    START = "start"  # it has no KV, or lost it


class Need(msgspec.Struct, frozen=True):
    """A sequence that was refused for want of `num_blocks` device blocks."""

    seq_id: int
    team_id: int
    kind: Kind
    num_blocks: int


class Resident(msgspec.Struct, frozen=True):
    """A sequence with all its KV on the device and no copy in flight."""

    seq_id: int
    team_id: int
    num_blocks: int
    num_spare: int = 0  # of these, blocks without KV yet
    num_dirty: int = 0  # blocks that a move out would copy
    num_host: int = 0  # host blocks it has
    is_whole: bool = True  # fully prefilled, nothing to replay
    num_computed: int = 0
    attained_us: int = 0
    is_protected: bool = False  # G2
    is_idle: bool = True  # it was not in the latest step
    replay_us: int = 0  # what computing its KV again would take; only asked for where KV is dropped

    @property
    def num_new_host(self) -> int:
        return max(0, self.num_blocks - self.num_spare - self.num_host)


class Away(msgspec.Struct, frozen=True):
    """A sequence with its KV on the host."""

    seq_id: int
    team_id: int
    num_blocks: int  # host blocks: what an upload copies
    num_wanted: int  # device blocks it wants free to come back: its own and those of its next tokens
    is_whole: bool = True
    num_computed: int = 0


class Pools(msgspec.Struct, frozen=True):
    """Blocks, in this moment."""

    free: int
    incoming: int  # device blocks that copies in flight will free
    promised: int  # missing blocks of the prompts that are half computed
    reserve: int  # G4: growth of the next steps
    host_free: int
    link_us: int  # G3: what the link may still be used


class Move(msgspec.Struct, frozen=True):
    """`kind` is out, in, drop, or forget (a clean host copy). Room is made for `for_seq` of `team_id`, which pays."""

    kind: str
    seq_id: int
    team_id: int
    for_seq: int = -1


class SwapPlanner:
    """Decides for one engine. Its only state is G5's: `gamma` and `min_run_steps` (m)."""

    def __init__(
        self, mode: str, *, gamma: int, min_run_steps: int, copy_us: Callable[[int], int], has_host: bool = True
    ) -> None:
        """`mode` is proactive, reactive or recompute; `copy_us` is the time of copying so many blocks one way."""
        self.mode = mode
        self.gamma = self._gamma_least = gamma
        self.min_run_steps = self._min_run_least = min_run_steps
        self.copy_us = copy_us
        self.can_swap = mode != "recompute" and has_host
        self._uploads = 0
        self._early = 0

    def pays(self, enst_us: int, num_dirty: int, num_blocks: int) -> bool:
        """G1: the turn is far enough to be worth the way out and back."""
        return enst_us >= self.gamma * (self.copy_us(num_dirty) + self.copy_us(num_blocks))

    def note_upload(self) -> None:
        """G5: an upload has started."""
        self._uploads += 1
        if self._uploads < AIMD_UPLOADS:
            return
        if self._early * 10 > self._uploads:
            self.gamma = min(GAMMA_MAX, max(1, self.gamma) * 2)
            self.min_run_steps = min(GAMMA_MAX * max(1, self._min_run_least), max(1, self.min_run_steps) * 2)
        else:
            self.gamma = max(self._gamma_least, self.gamma - 1)
            self.min_run_steps = max(self._min_run_least, self.min_run_steps - 1)
        self._uploads = self._early = 0

    def note_out(self, num_steps_run: int | None) -> None:
        """G5: moved out after so many steps since its last upload; None if it never was uploaded."""
        if num_steps_run is not None and num_steps_run < 2 * max(1, self._min_run_least):
            self._early += 1

    def plan(
        self,
        pools: Pools,
        residents: Sequence[Resident],
        away: Sequence[Away],
        needs: Iterable[Need],
        turns: Sequence[Turn],
        *,
        step_us: int,
        holder: int | None = None,
        grower_team: int | None = None,
        over_served: Callable[[Collection[int]], Sequence[int]] = sorted,
    ) -> list[Move]:
        """Moves for the next step. `needs` are in the order they were refused.

        `turns` name all the needs, the residents that are not protected, and those away that may come back unasked.
        `holder` of the reservation is served first and needs no G1. `grower_team` pays for the reserve.
        """
        room = _Room(self, pools, residents, away, turns, over_served)
        asked = set()
        num_failed = 0
        for need in sorted(needs, key=lambda need: need.seq_id != holder):
            asked.add(need.seq_id)
            if need.seq_id not in room.gone and (num_failed < FAILURES_MAX or need.kind is Kind.GROW):
                num_failed += not self._serve(room, need, is_holder=need.seq_id == holder)
        if self.mode != "proactive" or not self.can_swap:
            return room.moves
        for turn in turns:
            back = room.away.get(turn.seq_id)
            if back is None or back.seq_id in asked:
                continue
            if turn.enst_us > self.copy_us(back.num_blocks) + LEAD_STEPS * step_us:
                break
            need = Need(back.seq_id, back.team_id, Kind.UPLOAD, back.num_wanted)
            if not self._serve(room, need, num_spare=2 * pools.reserve):
                break
        missing = pools.reserve - room.free - room.incoming
        if missing > 0:
            room.clear(missing, for_seq=-1, team_id=grower_team, is_ahead=True)
        return room.moves

    def force(
        self,
        pools: Pools,
        residents: Sequence[Resident],
        away: Sequence[Away],
        needs: Iterable[Need],
        turns: Sequence[Turn],
        *,
        holder: int | None = None,
        over_served: Callable[[Collection[int]], Sequence[int]] = sorted,
    ) -> list[Move]:
        """Nothing can run: make room for the first of `needs` that room can be made for, the holder before all others.

        Empty when there is none.
        """
        for need in sorted(needs, key=lambda need: need.seq_id != holder):
            room = _Room(self, pools, residents, away, turns, over_served, is_forced=True)
            if self._serve(room, need, is_holder=True) and room.moves:
                return room.moves
        return []

    def _serve(self, room: "_Room", need: Need, *, is_holder: bool = False, num_spare: int | None = None) -> bool:
        """Bring one back or make room for it. What it will need is kept from those served after it. False: no room."""
        is_growing = need.kind is Kind.GROW
        room.spared.add(need.seq_id)
        kept = 0 if is_growing else room.pools.promised
        if not (is_growing or is_holder):
            kept += room.pools.reserve if num_spare is None else num_spare
        missing = need.num_blocks + kept - room.free - room.incoming
        num_moves = len(room.moves)
        if missing > 0 and not room.clear(
            missing,
            for_seq=need.seq_id,
            team_id=need.team_id,
            is_g1=not (is_growing or is_holder),
            may_drop=is_growing or room.is_forced,
        ):
            if len(room.moves) > num_moves:
                room.take(need.num_blocks)  # a part of it was freed, and is kept
            return False
        if need.kind is Kind.UPLOAD:
            back = room.away[need.seq_id]
            if need.num_blocks + kept <= room.free and room.may_copy:
                room.use_link(back.num_blocks)
                room.moves.append(Move("in", need.seq_id, need.team_id, need.seq_id))
                del room.away[need.seq_id]
        room.take(need.num_blocks)
        return True


class _Room:
    """What is free, and who may be moved out, while one set of moves is put together."""

    def __init__(
        self,
        planner: SwapPlanner,
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
