"""How long a step will take by the step profile, and which rows it may therefore have.

A prompt lengthens the step of everybody in it, so its rows have three bounds in time:

* a row of one sequence takes at most `chunk_us`, or a block if that takes longer; so does a row of a replay, which has
  no other bound;
* a step takes at most `step_us_max`: no prompt row is added beyond that, but for a first one of a block;
* all prompt rows of a team take at most what the policy leaves them (`policies.prompt_time`), beside the rows of other
  teams that get a token from this step.

The rows that get a token are those taken so far that sample, and those that are expected: sequences that decoded in the
step before, as many as slots are left. A row is cut to whole blocks. A team that has no room for a row worth its fixed
time has none in this step; its decode rows go on.

Decode rows lengthen a step, too. In the isolation `batch` that is not bounded, because batches are what makes a device
fast. In the isolation `strict` all rows of a team, whatever their kind, are bounded like its prompts, and the policy
hears how long the step would be for each team alone.
"""

import math
from collections.abc import Collection
from collections.abc import Sequence as Run

from engine.config import STRICT, EngineConfig
from engine.memory.manager import Place
from engine.plan import Row
from engine.request import Sequence
from policies.cost import StepProfile
from policies.policy import Policy
from policies.sequences import StepTime

CHUNK_FIXED_PARTS = 10  # a prompt row takes at most so many times the fixed part of a step
STEP_FIXED_PARTS = 45  # and a step so many times
UNBOUNDED_US = 1 << 62  # where steps have no fixed part, small ones cost nothing and large ones gain nothing


def chunk_us(config: EngineConfig, profile: StepProfile) -> int:
    """The most that a prompt row of several blocks may add to a step, in microseconds."""
    return config.prefill_chunk_us or math.ceil(CHUNK_FIXED_PARTS * profile.fixed_us) or UNBOUNDED_US


def step_us_max(config: EngineConfig, profile: StepProfile) -> int:
    """The longest that prompt rows may make a step, in microseconds."""
    return config.step_time_max_us or math.ceil(STEP_FIXED_PARTS * profile.fixed_us) or UNBOUNDED_US


def longest_step_us(config: EngineConfig, profile: StepProfile, context_len: int, num_device_blocks: int) -> int:
    """The longest that any step takes by the profile, in microseconds: that of all slots decoding, with all blocks in
    use, and of the one block of a prompt that every step has room for; or what prompt rows may make of it.
    """
    slots, block = config.max_batch_size, min(config.block_size, context_len)
    num_tokens = min(slots * context_len, num_device_blocks * config.block_size)
    decode_us = slots * profile.decode_row_us + num_tokens * profile.decode_context_us
    block_us = profile.prefill_marginal_us(context_len - block, block)
    return max(step_us_max(config, profile), math.ceil(profile.fixed_us + decode_us + block_us))


class StepTimer:
    """Owns the predicted time of the step that is being picked, by team and kind of row."""

    def __init__(self, config: EngineConfig, policy: Policy, profile: StepProfile) -> None:
        self._policy, self._profile = policy, profile
        self._block = config.block_size
        self._slots = config.max_batch_size
        self._is_strict = config.isolation == STRICT
        self._chunk_us = chunk_us(config, profile)
        self._step_us_max = step_us_max(config, profile)
        worth = profile.fixed_us / profile.prefill_token_us if profile.prefill_token_us else 0
        self._least_tokens = max(self._block, math.ceil(worth))
        self._fixed_us = round(profile.fixed_us)
        self.is_limited = True  # False: prompts may use what no other row does
        self.has_left_out = False  # rows of a team were passed over in this step
        self._is_open = False  # the parts of the step are known, and kept up to date
        self._ran_last: Collection[Sequence] = ()
        self._rows: Run[Row] = ()
        self._sequences: Run[Sequence] = ()
        self._marginals_us: Run[float] = ()
        self._expected: dict[int, tuple[int, int]] = {}  # seq_id: team and time of decode rows that are not taken yet
        self._decode_us: dict[int, int] = {}  # by team, of rows that decode
        self._last_us: dict[int, int] = {}  # by team, of rows that end a prompt
        self._prompt_us: dict[int, int] = {}  # by team, of all its prompt rows
        self._num_decode: dict[int, int] = {}
        self._num_last: dict[int, int] = {}
        self._num_prompt: dict[int, int] = {}
        self._taken_us: dict[int, int] = {}  # by team, of its decode rows that are in the step already
        self._num_taken: dict[int, int] = {}
        self._total_us = 0  # of all rows, expected ones too
        self._has_prompt = False

    def begin(
        self,
        ran_last: Collection[Sequence],
        rows: Run[Row],
        sequences: Run[Sequence],
        marginals_us: Run[float],
    ) -> None:
        """A step is being picked; `ran_last` had rows in the one before. The lists, row by row, grow with each row that
        is taken.
        """
        self._ran_last = ran_last
        self._rows, self._sequences, self._marginals_us = rows, sequences, marginals_us
        self._is_open = self.has_left_out = self._has_prompt = False

    def cost_us(self, marginal_us: float) -> int:
        """What a row of this marginal time will probably be charged: that, and a part of the fixed time."""
        return round(marginal_us) + self._fixed_us // max(1, len(self._ran_last))

    def step_time(self, rows: Run[Row], sequences: Run[Sequence], marginals_us: Run[float]) -> StepTime:
        """The predicted time of a step of these rows."""
        own_us: dict[int, float] = {}
        for row, sequence, us in zip(rows, sequences, marginals_us, strict=True):
            if row.is_decode:
                team_id = sequence.request.team_id
                own_us[team_id] = own_us.get(team_id, 0.0) + us
        fixed_us = self._profile.fixed_us
        if not own_us:
            predicted_us = max(1, round(fixed_us + sum(marginals_us)))
            return StepTime(predicted_us, predicted_us)
        predicted_us, decode_us = round(fixed_us + sum(marginals_us)), round(fixed_us + sum(own_us.values()))
        if not self._is_strict:
            return StepTime(predicted_us, decode_us)
        return StepTime(predicted_us, decode_us, {team_id: round(fixed_us + us) for team_id, us in own_us.items()})

    # -- while a step is picked --------------------------------------------------------------------------------------

    def row_end(self, sequence: Sequence, end: int) -> int:
        """Up to which token, at most `end`, a row of the policy's best sequence may go in this step. Its start: it may
        not, and the policy knows.
        """
        memory, team_id = sequence.memory, sequence.request.team_id
        start = memory.num_computed
        if start < memory.replay_to:
            return self._chunk_end(start, end)
        if sequence.output_token_ids:
            if self._is_strict and self.is_limited and not self._may_decode(sequence, end):
                self.has_left_out = True
                self._policy.leave_team(team_id)
                return start
            return end
        end = self._prompt_end(sequence, end)
        if end == start:
            self.has_left_out = True
            self._policy.leave_prompts(team_id)
        return end

    def end(self) -> None:
        """The step is picked: keep nothing of it."""
        self._ran_last = self._rows = self._sequences = self._marginals_us = ()
        self._expected = {}
        self._decode_us, self._last_us, self._prompt_us, self._taken_us = {}, {}, {}, {}
        self._num_decode, self._num_last, self._num_prompt, self._num_taken = {}, {}, {}, {}

    def took(self, row: Row, sequence: Sequence, marginal_us: float) -> None:
        """The policy has taken this row."""
        if self._is_open:
            us = round(marginal_us)
            if self._expected.pop(row.seq_id, None) is None:
                self._add(row, sequence, us)
            if row.is_decode:
                self._add_taken(sequence.request.team_id, us)
            while len(self._expected) >= max(1, self._slots - len(self._rows)):  # one slot is for the row asked for
                _, (team_id, us) = self._expected.popitem()
                self._add_decode(team_id, -us, -1)

    def _open(self) -> None:
        """Sum up what was taken so far and what is expected."""
        self._is_open = True
        self._expected = {}
        taken = {row.seq_id for row in self._rows}
        self._decode_us, self._last_us, self._prompt_us, self._taken_us = {}, {}, {}, {}
        self._num_decode, self._num_last, self._num_prompt, self._num_taken = {}, {}, {}, {}
        self._total_us = 0
        for row, sequence, marginal_us in zip(self._rows, self._sequences, self._marginals_us, strict=True):
            self._add(row, sequence, round(marginal_us))
            if row.is_decode:
                self._add_taken(sequence.request.team_id, round(marginal_us))
        decode_marginal_us = self._profile.decode_marginal_us
        slots_left = self._slots - len(self._rows) - 1  # one is for the row that is being asked for
        for sequence in self._ran_last:
            if slots_left <= 0:
                break
            memory = sequence.memory
            if (
                sequence.output_token_ids
                and memory.place is Place.DEVICE
                and memory.num_computed >= memory.replay_to
                and sequence.seq_id not in taken
            ):
                slots_left -= 1
                team_id, us = sequence.request.team_id, round(decode_marginal_us(memory.num_computed + 1))
                self._expected[sequence.seq_id] = team_id, us
                self._add_decode(team_id, us)

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
        self._num_prompt[team_id] = self._num_prompt.get(team_id, 0) + 1
        if row.samples:
            self._last_us[team_id] = self._last_us.get(team_id, 0) + marginal_us
            self._num_last[team_id] = self._num_last.get(team_id, 0) + 1

    def _add_decode(self, team_id: int, marginal_us: int, num_rows: int = 1) -> None:
        self._total_us += marginal_us
        self._decode_us[team_id] = self._decode_us.get(team_id, 0) + marginal_us
        self._num_decode[team_id] = self._num_decode.get(team_id, 0) + num_rows

    def _add_taken(self, team_id: int, marginal_us: int) -> None:
        self._taken_us[team_id] = self._taken_us.get(team_id, 0) + marginal_us
        self._num_taken[team_id] = self._num_taken.get(team_id, 0) + 1

    # -- the bounds --------------------------------------------------------------------------------------------------

    def _may_decode(self, sequence: Sequence, end: int) -> bool:
        """In the isolation `strict`: the first row of a team, and those that its part of the step has room for."""
        if not self._is_open:
            self._open()
        team_id = sequence.request.team_id
        if not self._num_taken.get(team_id) and not self._num_prompt.get(team_id):
            return True
        left_us = self._left_us(team_id)
        return left_us is None or self._profile.decode_marginal_us(end) <= left_us

    def _prompt_end(self, sequence: Sequence, end: int) -> int:
        """Up to which token a prompt row may go; its start if it may not."""
        if not self._is_open:
            self._open()
        start = sequence.memory.num_computed
        marginal_us = self._profile.prefill_marginal_us
        end = self._chunk_end(start, end)
        if not self.is_limited:
            return end
        room_us = self._step_us_max - self._fixed_us - self._total_us
        if not self._has_prompt:
            room_us = max(room_us, self._block_us(start))
        left_us = self._left_us(sequence.request.team_id)
        if left_us is not None:
            room_us = min(room_us, left_us)
        if marginal_us(start, end - start) <= room_us:
            return end
        cut = self._fit(start, end, room_us)
        is_share_short = left_us is not None and left_us <= room_us
        if cut > start and not (is_share_short and marginal_us(start, self._least_tokens) > room_us):
            return cut
        return start

    def _chunk_end(self, start: int, end: int) -> int:
        """Up to which token a row of prompt or replay from `start` may go at the most: as far as `chunk_us` allows, or
        to the end of its block.
        """
        return self._fit(start, end, max(self._chunk_us, self._block_us(start)))

    def _block_us(self, start: int) -> int:
        """Of the rest of the block that `start` is in."""
        return math.ceil(self._profile.prefill_marginal_us(start, self._block - start % self._block))

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
        """What the policy leaves the prompts of this team in this step (or all its rows, if isolation is strict); None
        is no limit.
        """
        decode_us, last_us, num_decode, num_last = self._decode_us, self._last_us, self._num_decode, self._num_last
        is_strict = self._is_strict
        own_rows = self._num_taken.get(team_id, 0) + self._num_prompt.get(team_id, 0)
        num_rows = sum(num_decode.values()) + sum(num_last.values()) - num_last.get(team_id, 0)
        if is_strict:
            num_rows += own_rows - num_decode.get(team_id, 0) + 1
        parts: dict[int, int] = {}
        for other in num_decode.keys() | num_last.keys():
            count = num_decode.get(other, 0) + num_last.get(other, 0)
            if other != team_id and count:
                marginal_us = decode_us.get(other, 0) + last_us.get(other, 0)
                parts[other] = marginal_us + self._fixed_us * count // num_rows
        if not parts:
            return None
        if is_strict:
            step_us = sum(parts.values())
            used_us = self._taken_us.get(team_id, 0) + self._prompt_us.get(team_id, 0)
            used_us += self._fixed_us * (own_rows + 1) // num_rows
        else:
            step_us = self._fixed_us + sum(decode_us.values()) + sum(last_us.values()) - last_us.get(team_id, 0)
            used_us = self._prompt_us.get(team_id, 0)
        limit_us = self._policy.prompt_time_us(team_id, parts, step_us)
        return None if limit_us is None else limit_us - used_us
