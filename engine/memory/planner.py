"""Which sequences give up their device blocks, and which get theirs back. Values in, moves out; no block is touched.

FastServe's proactive swapping (arXiv 2305.05920, section on KV swapping), made fair between teams: everything goes by
`Turn`, the time until a sequence will probably run next (ENST), which the policy knows. Those that run late are moved
out first, and a team that is locked out of its share runs late. Those that run soon are brought back before their turn.

Guards, each against a way to thrash (docs/scheduling.md, "What may be moved out"):

* G1 a move out must pay: the turn is at least gamma round trips of its own copies away. Growth of a sequence that
  already holds its KV is exempt, for it has a slot that would stay empty, but may only move out what ranks behind it.
* G2 m steps after an upload are safe, and so is (G6) the *leader*, the resident sequence with the most work behind it,
  but for the holder of the reservation when the leader's team is over the gate as seen from the holder's.
* G3 the link's budget. G4 blocks kept free for the growth of the next steps. G5 gamma and m double when more than a
  tenth of the uploads are moved out again soon, and fall back slowly. G7 what comes back early must leave twice the
  reserve, what goes out leaves once.

When nothing at all could run, `force` makes room whatever the guards say: the sequence that runs last goes first.
When the host is full too, the fully prefilled sequence with the fewest computed tokens among the most over-served teams
drops its KV (docs/architecture.md), for growth and in `force` only; `engine.memory.mover` drops more, where the claims
of all leave the reservation's holder none. A half-prefilled sequence is never dropped.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from engine.memory.moves import Away, Holder, Kind, Move, Need, Pools, Resident
from engine.memory.room import Room
from policies.sequences import Turn

AIMD_UPLOADS = 32  # uploads over which G5 counts
GAMMA_MAX = 64
FAILURES_MAX = 8  # needs, other than growth, that no room is found for, before a plan gives up on those behind them
LEAD_STEPS = 2  # an upload may start this many steps before it must


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
        holder: Holder | None = None,
        grower_team: int | None = None,
        over_served: Callable[[Collection[int]], Sequence[int]] = sorted,
    ) -> list[Move]:
        """Moves for the next step. `needs` are in the order they were refused.

        `turns` name all the needs, the residents that are not protected, and those away that may come back unasked.
        `holder` of the reservation is served first and needs no G1. `grower_team` pays for the reserve.
        """
        room = Room(self, pools, residents, away, turns, over_served, holder)
        asked = set()
        num_failed = 0
        held_for = holder.seq_id if holder is not None else None
        for need in sorted(needs, key=lambda need: need.seq_id != held_for):
            asked.add(need.seq_id)
            if need.seq_id not in room.gone and (num_failed < FAILURES_MAX or need.kind is Kind.GROW):
                num_failed += not self._serve(room, need, held_for)
        if self.mode != "proactive" or not self.can_swap:
            return room.moves
        for turn in turns:
            back = room.away.get(turn.seq_id)
            if back is None or back.seq_id in asked:
                continue
            if turn.enst_us > self.copy_us(back.num_blocks) + LEAD_STEPS * step_us:
                break
            need = Need(back.seq_id, back.team_id, Kind.UPLOAD, back.num_wanted)
            if not self._place(room, need, pools.promised + 2 * pools.reserve, room.make_room_for_claim):
                break
        missing = pools.reserve - room.free - room.incoming
        if missing > 0:
            room.make_room_ahead(missing, grower_team)
        return room.moves

    def force(
        self,
        pools: Pools,
        residents: Sequence[Resident],
        away: Sequence[Away],
        needs: Iterable[Need],
        turns: Sequence[Turn],
        *,
        holder: Holder | None = None,
        over_served: Callable[[Collection[int]], Sequence[int]] = sorted,
    ) -> list[Move]:
        """Nothing can run: make room for the first of `needs` that room can be made for, the holder before all others.

        Empty when there is none.
        """
        pools = msgspec.structs.replace(pools, link_us=sys.maxsize)  # G3 does not hold either
        held_for = holder.seq_id if holder is not None else None
        for need in sorted(needs, key=lambda need: need.seq_id != held_for):
            room = Room(self, pools, residents, away, turns, over_served, holder)
            num_kept = 0 if need.kind is Kind.GROW else pools.promised
            if self._place(room, need, num_kept, room.make_room_at_any_cost) and room.moves:
                return room.moves
        return []

    def _serve(self, room: Room, need: Need, held_for: int | None) -> bool:
        """Bring a refused sequence back or make room for it. False: no room."""
        pools = room.pools
        if need.kind is Kind.GROW:
            return self._place(room, need, 0, room.make_room_for_growth)
        if need.seq_id == held_for:
            return self._place(room, need, pools.promised, room.make_room_for_holder)
        return self._place(room, need, pools.promised + pools.reserve, room.make_room_for_claim)

    def _place(self, room: Room, need: Need, num_kept: int, make_room: Callable[[int, Need], bool]) -> bool:
        """Find the blocks of `need` beside `num_kept` that stay free, with `make_room` when they are not there.

        What the sequence will need is kept from those that are served after it. False: no room.
        """
        room.spared.add(need.seq_id)
        missing = need.num_blocks + num_kept - room.free - room.incoming
        num_moves = len(room.moves)
        if missing > 0 and not make_room(missing, need):
            if len(room.moves) > num_moves:
                room.take(need.num_blocks)  # a part of it was freed, and is kept
            return False
        if need.kind is Kind.UPLOAD:
            back = room.away[need.seq_id]
            if need.num_blocks + num_kept <= room.free and room.may_copy:
                room.use_link(back.num_blocks)
                room.moves.append(Move("in", need.seq_id, need.team_id, need.seq_id))
                del room.away[need.seq_id]
        room.take(need.num_blocks)
        return True
