"""The KV memory as the swap planner sees it: plain values, made anew for each plan."""

from collections.abc import Collection, Iterable

from engine.blocks import blocks_for
from engine.config import EngineConfig
from engine.memory.holding import Place
from engine.memory.moves import Away, Pools, Resident
from engine.memory.planner import SwapPlanner
from engine.memory.pools import KVMemory
from engine.request import Sequence
from policies.cost import StepProfile

RESERVE_STEPS = 4  # H of guard G4
_NEARLY_FULL = 8  # less than one block in so many is free


class MemoryView:
    """Owns the lists of who is on the device, away or half computed, and what half-computed prompts were promised."""

    def __init__(
        self,
        config: EngineConfig,
        profile: StepProfile,
        memory: KVMemory,
        planner: SwapPlanner,
    ) -> None:
        self.half: dict[int, Sequence] = {}  # started and not whole
        self.resident: dict[int, Sequence] = {}  # KV on the device, and no copy in flight
        self.away: dict[int, Sequence] = {}  # KV on the host, or on the way there or back, the longest away first
        self._away_views: dict[int, Away] = {}  # of those that are away, once they were looked at
        self.num_promised = 0  # missing blocks of the half-computed prompts on the device
        self._memory, self._planner = memory, planner
        self._profile = profile
        self._block_size = config.block_size

    def wanted_to_return(self, sequence: Sequence) -> int:
        """Device blocks that one on the host wants free: its own, and those of its whole prompt or its next token."""
        tokens = sequence.num_to_fill if sequence.is_half else sequence.num_computed + 1
        return min(
            sequence.memory.num_blocks_max, max(len(sequence.memory.table.host), blocks_for(tokens, self._block_size))
        )

    def started(self, sequence: Sequence) -> None:
        """It has its first blocks, or its first since its KV was dropped."""
        self.half[sequence.seq_id] = self.resident[sequence.seq_id] = sequence
        self.promise(sequence)

    def filled(self, sequence: Sequence) -> None:
        """Its prompt is whole, or whole again."""
        self.half.pop(sequence.seq_id, None)
        self.promise(sequence)

    def went_out(self, sequence: Sequence) -> None:
        """Its KV leaves the device."""
        self.away[sequence.seq_id] = sequence
        del self.resident[sequence.seq_id]
        self.promise(sequence)

    def came_back(self, sequence: Sequence) -> None:
        """Its KV is on the device again."""
        self.forget_away(sequence)
        self.resident[sequence.seq_id] = sequence
        self.promise(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Its KV is gone, wherever it was, or it has ended."""
        self.forget_away(sequence)
        self.half.pop(sequence.seq_id, None)
        self.resident.pop(sequence.seq_id, None)
        self.promise(sequence)

    def promise(self, sequence: Sequence) -> None:
        """Note what the prompt of `sequence` still lacks on the device, if it is half computed and there."""
        lacks = 0
        if sequence.seq_id in self.half and sequence.seq_id in self.resident:
            lacks = max(0, blocks_for(sequence.num_to_fill, self._block_size) - len(sequence.memory.table.blocks))
        self.num_promised += lacks - sequence.memory.num_promised
        sequence.memory.num_promised = lacks

    def reserve(self, ran_last: Iterable[Sequence]) -> int:
        """G4: blocks that those now decoding take in the next steps."""
        size = self._block_size
        resident, half = self.resident, self.half
        total = 0
        for sequence in ran_last:
            seq_id = sequence.seq_id
            if seq_id in resident and seq_id not in half:
                ahead = min(sequence.num_computed + RESERVE_STEPS, sequence.request.total_tokens_max)
                missing = -(-ahead // size) - len(sequence.memory.table.blocks)
                if missing > 0:
                    total += missing
        return total

    def pools(self, reserve: int, link_us: int) -> Pools:
        """What is free, given the reserve and what the link may still be used."""
        memory = self._memory
        return Pools(
            free=memory.device.num_free,
            incoming=memory.num_incoming,
            promised=self.num_promised,
            reserve=reserve,
            host_free=memory.host.num_free,
            link_us=link_us,
        )

    def frontier(self, first: Iterable[int], most: int) -> list[Sequence]:
        """Those on the host that may come back by a plan, `first` among them: at most `most`."""
        if len(self.away) <= most:
            return list(self.away.values())
        named = {seq_id: self.away[seq_id] for seq_id in first if seq_id in self.away}
        for seq_id, sequence in self.away.items():
            if len(named) >= most:
                break
            named[seq_id] = sequence
        return list(named.values())

    @property
    def is_host_nearly_full(self) -> bool:
        """The least computed of all may have to give way."""
        host = self._memory.host
        return host.num_free * _NEARLY_FULL < host.num_blocks

    def sequences(self, away: Iterable[Sequence]) -> tuple[list[Resident], list[Away]]:
        """All that are on the device, and of `away` those that are on the host, with no copy in flight."""
        residents = [self._resident(sequence) for sequence in self.resident.values()]
        return residents, [self._away(sequence) for sequence in away if sequence.memory.place is Place.HOST]

    def forget_away(self, sequence: Sequence) -> None:
        """It is no longer away, if it was."""
        self.away.pop(sequence.seq_id, None)
        self._away_views.pop(sequence.seq_id, None)

    def _away(self, sequence: Sequence) -> Away:
        """Nothing of it changes while it is on the host."""
        found = self._away_views.get(sequence.seq_id)
        if found is None:
            found = self._away_views[sequence.seq_id] = Away(
                sequence.seq_id,
                sequence.request.team_id,
                len(sequence.memory.table.host),
                self.wanted_to_return(sequence),
                not sequence.is_half,
                sequence.num_computed,
            )
        return found

    def _resident(self, sequence: Sequence) -> Resident:
        table = sequence.memory.table
        seq_id, num_computed, num_blocks = sequence.seq_id, sequence.num_computed, len(table.blocks)
        num_used = -(-num_computed // self._block_size)
        return Resident(
            seq_id,
            sequence.request.team_id,
            num_blocks,
            num_blocks - num_used,
            num_used - self._memory.num_clean(table, num_computed),
            len(table.host),
            seq_id not in self.half,
            num_computed,
            sequence.work_us,
            sequence.memory.is_protected,
            not sequence.is_running,
            0 if self._planner.can_swap else self._profile.prefill_work_us(0, num_computed),
        )

    def check(self, live: Collection[Sequence]) -> None:
        """Assert that the lists agree with the sequences."""
        moving = (Place.GOING_OUT, Place.HOST, Place.COMING_BACK)
        assert self.away.keys() == {s.seq_id for s in live if s.memory.place in moving}
        there = [s for s in self.half.values() if s.seq_id in self.resident]
        lacks = sum(max(0, blocks_for(s.num_to_fill, self._block_size) - len(s.memory.table.blocks)) for s in there)
        assert self.num_promised == lacks == sum(s.memory.num_promised for s in live)
        assert self.resident.keys() == {s.seq_id for s in live if s.memory.place is Place.DEVICE}
        assert self.half.keys() == {s.seq_id for s in live if s.memory.is_started and s.is_half}
