"""How long a step will take by the step profile, and how much of it prompts may take.

A prompt lengthens the step of everybody in it, so its rows have three bounds in time:

* a row of one sequence takes at most `chunk_us`;
* a step takes at most `step_us_max`: no prompt row is added beyond that;
* all prompt rows of a team take at most what the policy leaves it (`policies.prompt_time`), beside the rows of other
  teams that get a token from this step.

The rows that get a token are those taken so far that sample, and those that are expected: sequences that decoded in the
step before, as many as slots are left. A row is cut to whole blocks. A team that has no room for a row worth its fixed
time has none in this step.
"""

import math
from collections.abc import Collection, Sequence as Run

from engine.config import EngineConfig
from engine.memory.holding import Place
from engine.plan import Row
from engine.request import Sequence
from policies.cost import StepProfile
from policies.policy import Policy
from policies.sequences import AS_SERVED, StepTime

CHUNK_FIXED_PARTS = 10  # a prompt row takes at most so many times the fixed part of a step
STEP_FIXED_PARTS = 50  # and a step so many times


def chunk_us(config: EngineConfig, profile: StepProfile) -> int:
    """The most that a prompt row of several blocks may add to a step, in microseconds."""
    return config.prefill_chunk_us or math.ceil(CHUNK_FIXED_PARTS * profile.fixed_us)


def step_us_max(config: EngineConfig, profile: StepProfile) -> int:
    """The longest that prompt rows may make a step, in microseconds."""
    return config.step_time_max_us or math.ceil(STEP_FIXED_PARTS * profile.fixed_us)


class StepTimer:
    """Owns the predicted time of the step that is being picked."""

    def __init__(self, config: EngineConfig, policy: Policy, profile: StepProfile) -> None:
        self._policy, self._profile = policy, profile
        self._block = config.block_size
        self._chunk_us = chunk_us(config, profile)
        self._step_us_max = step_us_max(config, profile)
        worth = profile.fixed_us / profile.prefill_token_us if profile.prefill_token_us else 0
        self._least_tokens = max(self._block, math.ceil(worth))
        self._fixed_us = round(profile.fixed_us)
        self.is_limited = True  # False: prompts may use what no other row does
        self.has_left_out = False  # prompts of a team were passed over in this step
        self.is_open = False  # the parts of the step are known, and every row taken is to be told
        self._ran_last: Collection[Sequence] = ()
        self._counted: set[int] = set()
        self._decode_us: dict[int, int] = {}  # by team, of rows that decode
        self._last_us: dict[int, int] = {}  # by team, of rows that end a prompt
        self._prompt_us: dict[int, int] = {}  # by team, of all its prompt rows
        self._num_rows: dict[int, int] = {}  # by team, of both kinds that get a token
        self._num_last: dict[int, int] = {}
        self._total_us = 0  # of all rows, expected ones too
        self._has_prompt = False

    def begin(self, ran_last: Collection[Sequence]) -> None:
        """A step is being picked; `ran_last` had rows in the one before."""
        self._ran_last = ran_last
        self.is_open = self.has_left_out = self._has_prompt = False

    def _open(self, rows: Run[Row], sequences: Run[Sequence], marginals_us: Run[float], slots_left: int) -> None:
        """Sum up what was taken so far and what is expected."""
        self.is_open = True
        self._counted = {row.seq_id for row in rows}
        self._decode_us, self._last_us, self._prompt_us = {}, {}, {}
        self._num_rows, self._num_last = {}, {}
        self._total_us = 0
        for row, sequence, marginal_us in zip(rows, sequences, marginals_us, strict=True):
            self._add(row, sequence, round(marginal_us))
        decode_marginal_us = self._profile.decode_marginal_us
        for sequence in self._ran_last:
            if not slots_left:
                break
            memory = sequence.memory
            if (
                sequence.output_token_ids
                and memory.place is Place.DEVICE
                and memory.num_computed >= memory.replay_to
                and sequence.seq_id not in self._counted
            ):
                slots_left -= 1
                self._counted.add(sequence.seq_id)
                self._add_decode(sequence.request.team_id, round(decode_marginal_us(memory.num_computed + 1)))

    def took(self, row: Row, sequence: Sequence, marginal_us: float) -> None:
        """The policy has taken this row."""
        if row.seq_id not in self._counted:
            self._counted.add(row.seq_id)
            self._add(row, sequence, round(marginal_us))

    def _add(self, row: Row, sequence: Sequence, marginal_us: int) -> None:
        team_id = sequence.request.team_id
        if row.is_decode:
            self._add_decode(team_id, marginal_us)
            return
        self._total_us += marginal_us
        self._has_prompt = True
        if row.start < sequence.memory.replay_to:
            return
        self._prompt_us[team_id] = self._prompt_us.get(team_id, 0) + marginal_us
        if row.samples:
            self._last_us[team_id] = self._last_us.get(team_id, 0) + marginal_us
            self._num_last[team_id] = self._num_last.get(team_id, 0) + 1

    def _add_decode(self, team_id: int, marginal_us: int) -> None:
        self._total_us += marginal_us
        self._decode_us[team_id] = self._decode_us.get(team_id, 0) + marginal_us
        self._num_rows[team_id] = self._num_rows.get(team_id, 0) + 1

    def prompt_end(
        self,
        sequence: Sequence,
        end: int,
        rows: Run[Row],
        sequences: Run[Sequence],
        marginals_us: Run[float],
        slots_left: int,
    ) -> int:
        """Up to which token, at most `end`, a prompt row of `sequence` may go in this step; its start when it may not.

        The other arguments are what the step has taken so far, and the slots it has left.
        """
        if not self.is_open:
            self._open(rows, sequences, marginals_us, slots_left)
        start = sequence.num_computed
        marginal_us = self._profile.prefill_marginal_us
        block_us = math.ceil(marginal_us(start, self._block - start % self._block))
        end = self._fit(start, end, max(self._chunk_us, block_us))
        if not self.is_limited:
            return end
        room_us = self._step_us_max - self._fixed_us - self._total_us
        if not self._has_prompt:
            room_us = max(room_us, block_us)
        left_us = self._left_us(sequence.request.team_id)
        if left_us is not None:
            room_us = min(room_us, left_us)
        if marginal_us(start, end - start) <= room_us:
            return end
        cut = self._fit(start, end, room_us)
        is_worth = marginal_us(start, self._least_tokens) <= room_us
        if cut > start and (is_worth or left_us is None or left_us > room_us):
            return cut
        self.has_left_out = True
        return start

    def _fit(self, start: int, end: int, room_us: int) -> int:
        """The last end of a block, or `end`, that a row from `start` reaches in `room_us`; `start` if there is none."""
        profile = self._profile
        if profile.prefill_marginal_us(start, end - start) <= room_us:
            return end
        if room_us <= 0:
            return start
        # The marginal time of n tokens is slope * n + curve * n^2.
        curve = profile.prefill_attention_us / 2
        slope = profile.prefill_token_us + profile.prefill_attention_us * (start + 0.5)
        if curve:
            num_tokens = int((math.sqrt(slope * slope + 4 * curve * room_us) - slope) / (2 * curve))
        else:
            num_tokens = int(room_us / slope)
        return max(start, (start + num_tokens) // self._block * self._block)

    def _left_us(self, team_id: int) -> int | None:
        """What the policy leaves the prompts of this team in this step; None is no limit."""
        own_last_us, own_last = self._last_us.get(team_id, 0), self._num_last.get(team_id, 0)
        num_rows = sum(self._num_rows.values()) + sum(self._num_last.values()) - own_last
        rows_us = sum(self._decode_us.values()) + sum(self._last_us.values()) - own_last_us
        others: dict[int, int] = {}
        for other in self._num_rows.keys() | self._num_last.keys():
            if other != team_id:
                count = self._num_rows.get(other, 0) + self._num_last.get(other, 0)
                marginal_us = self._decode_us.get(other, 0) + self._last_us.get(other, 0)
                others[other] = marginal_us + self._fixed_us * count // num_rows
        if not others:
            return None
        limit_us = self._policy.prompt_time_us(team_id, others, self._fixed_us + rows_us)
        return None if limit_us is None else limit_us - self._prompt_us.get(team_id, 0)


def step_time(profile: StepProfile, rows: Run[Row], marginals_us: Run[float]) -> StepTime:
    """The predicted time of these rows, and of those that decode alone."""
    decode_us = sum([us for row, us in zip(rows, marginals_us, strict=True) if row.is_decode])
    if not decode_us:
        return AS_SERVED
    return StepTime(round(profile.fixed_us + sum(marginals_us)), round(profile.fixed_us + decode_us))
