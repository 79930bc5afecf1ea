"""The KV memory as the swap planner sees it: plain values, made anew for each plan."""

from collections.abc import Iterable, Mapping

from engine.blocks import blocks_for
from engine.config import EngineConfig
from engine.memory import KVMemory
from engine.request import Sequence, Status
from engine.swap_planner import Away, Pools, Resident, SwapPlanner
from policies.cost import StepProfile

RESERVE_STEPS = 4  # H of guard G4
_PROTECTED_STEPS = 4  # times m: a sequence that is not picked is no longer safe after so many steps
_RESIDENT = (Status.RUNNING, Status.PAUSED)


class MemoryView:
    """Reads sequences and pools, and changes nothing. Owns only `half`, for whoever starts and fills sequences."""

    def __init__(
        self,
        config: EngineConfig,
        profile: StepProfile,
        memory: KVMemory,
        sequences: Mapping[int, Sequence],
        planner: SwapPlanner,
    ) -> None:
        self.half: dict[int, Sequence] = {}  # started and not whole
        self._memory, self._sequences, self._planner = memory, sequences, planner
        self._profile = profile
        self._block_size = config.block_size

    def wanted_to_return(self, sequence: Sequence) -> int:
        """Device blocks that one on the host wants free: its own, and those of its whole prompt or its next token."""
        tokens = sequence.num_to_fill if sequence.is_half else sequence.num_computed + 1
        return min(sequence.num_blocks_max, max(len(sequence.table.host), blocks_for(tokens, self._block_size)))

    def promised(self) -> int:
        """Missing blocks of the half-computed prompts on the device."""
        return sum(
            blocks_for(one.num_to_fill, self._block_size) - len(one.table.blocks)
            for one in self.half.values()
            if one.table.blocks or one.status in _RESIDENT
        )

    def reserve(self, ran_last: Iterable[Sequence]) -> int:
        """G4: blocks that those now decoding take in the next steps."""
        size = self._block_size
        total = 0
        for one in ran_last:
            if one.status in _RESIDENT and not one.is_half:
                ahead = min(one.num_computed + RESERVE_STEPS, one.request.total_tokens_max)
                total += max(0, blocks_for(ahead, size) - len(one.table.blocks))
        return total

    def pools(self, reserve: int, link_us: int) -> Pools:
        """What is free, given the reserve and what the link may still be used."""
        memory = self._memory
        return Pools(
            free=memory.device.num_free,
            incoming=memory.num_incoming,
            promised=self.promised(),
            reserve=reserve,
            host_free=memory.host.num_free,
            link_us=link_us,
        )

    def sequences(self, num_steps: int) -> tuple[list[Resident], list[Away]]:
        """All that are on the device, and all that are on the host, with no copy in flight."""
        residents: list[Resident] = []
        away: list[Away] = []
        for one in self._sequences.values():
            table = one.table
            if one.status in _RESIDENT:
                if table.blocks:
                    residents.append(self._resident(one, num_steps))
            elif one.status is Status.SWAPPED:
                wanted = self.wanted_to_return(one)
                team_id = one.request.team_id
                away.append(Away(one.seq_id, team_id, len(table.host), wanted, not one.is_half, one.num_computed))
        return residents, away

    def _resident(self, one: Sequence, num_steps: int) -> Resident:
        table = one.table
        num_used = blocks_for(one.num_computed, self._block_size)
        is_safe = one.min_run_left > 0 and (
            one.uploaded_step is None or num_steps - one.uploaded_step < _PROTECTED_STEPS * self._planner.min_run_steps
        )
        return Resident(
            seq_id=one.seq_id,
            team_id=one.request.team_id,
            num_blocks=len(table.blocks),
            num_spare=len(table.blocks) - num_used,
            num_dirty=num_used - self._memory.num_clean(table, one.num_computed),
            num_host=len(table.host),
            is_whole=not one.is_half,
            num_computed=one.num_computed,
            attained_us=one.work_us,
            is_protected=is_safe,
            is_idle=one.status is Status.PAUSED,
            replay_us=0 if self._planner.can_swap else self._profile.prefill_work_us(0, one.num_computed),
        )
