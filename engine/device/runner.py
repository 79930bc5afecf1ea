"""TorchRunner: does what a StepPlan says with a real model. Beside the KV in the blocks it keeps almost no state.

A plan's copies out start first, then its copies in, then its rows run. A copy is over when a result names it, be it
this plan's result or a later one. Rows never touch the blocks of a copy in flight, so the order inside a step is free
to change.

An exception is narrowed to the row that causes it. When an attempt to run rows raises, each half of the rows is tried
by itself, and so on, down to single rows. A row that raises alone fails; every other row has its token. Trying rows
again is safe: an attempt writes the KV of its own rows' tokens and nothing else, and a row's token does not depend on
the rows beside it. A step of n rows makes at most 2n - 1 attempts: at most 15 for 8 rows.

Two things end the engine. If not even a harmless row of one token runs, the device is broken, and the exception goes
on. A failed assertion goes on at once: this code is wrong then, and nothing that it computes can be trusted.
"""

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.device.attention import Span
from engine.device.copy_engine import CopyEngine, SyncCopy
from engine.device.kv_cache import KVCache
from engine.device.kv_canary import KVCanary
from engine.device.model import Batch, Model
from engine.device.sampler import Draw, sample
from engine.plan import Row, StepPlan, StepResult
from engine.wire.messages import SamplingParams

logger = logging.getLogger(__name__)

REASON_CHARS_MAX = 200
_PROBE_SEQ_ID = -1


@dataclass(slots=True)
class _Tried:
    """What has come of a step's rows so far. `tokens` and `failed` are by seq_id."""

    step_id: int
    tokens: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    raised: list[int] = field(default_factory=list)  # the seq_ids in `failed` whose row raised alone
    num_raised: int = 0  # attempts that raised
    raised_ns: int = 0  # how long the attempts that raised took, and the check of the device
    is_device_sound: bool = False  # an attempt, or the check of the device, has run to its end in this step


class TorchRunner:
    """Runs steps on one device. Implements the Runner protocol of `engine.step.core`."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        eos_token_ids: tuple[int, ...],
        num_tokens: int,
        copies: CopyEngine | None = None,
        canary: KVCanary | None = None,
    ) -> None:
        """`num_tokens` is the number of ids the tokenizer knows. The embedding may have more rows: never sampled.

        `copies` None is SyncCopy if the cache has a host pool. `canary` checks that swapped KV comes back unchanged.
        """
        self.model = model
        self.cache = cache
        self.attention = model.attention(cache)
        self.eos_token_ids = eos_token_ids
        self.num_tokens = min(num_tokens, model.config.vocab_size)
        if copies is None and cache.host_pool is not None:
            copies = SyncCopy(cache.pool[: cache.num_blocks], cache.host_pool)
        self.copies = copies
        self.canary = canary
        self._spoiled: dict[int, str] = {}  # seq_id -> how its KV came back changed; no row of such a sequence may run

    def execute(self, plan: StepPlan) -> StepResult:
        """Start the plan's copies, run its rows and sample. A plan with neither waits for a copy in flight.

        A fault that one row causes fails that row, and the other rows get their tokens. Raises what a broken device
        raises. Copies in a plan, where there is no host pool, are a bug of the caller's: an assertion fails.
        """
        started = time.perf_counter_ns()
        copies_done, copies_failed = self._copy(plan)
        copy_us = (
            (time.perf_counter_ns() - started) // 1000 if plan.copies_out or plan.copies_in or not plan.rows else 0
        )
        tried = _Tried(plan.step_id)
        rows: list[Row] = []
        for row in _ordered(plan.rows):
            fault = self._fault(row)
            if fault:
                tried.failed[row.seq_id] = fault
            else:
                rows.append(row)
        if rows:
            self._try(rows, tried)
        duration_us = max(1, (time.perf_counter_ns() - started) // 1000)
        return StepResult(
            plan.step_id,
            duration_us,
            tried.tokens,
            tried.failed,
            copies_done,
            copy_us,
            copies_failed,
            _blame(tried, duration_us - copy_us),
            tried.num_raised,
        )

    def release(self, seq_id: int) -> None:
        """Forget a sequence that has ended. Its blocks are cleared when a new owner writes the first token to them."""
        self._spoiled.pop(seq_id, None)
        if self.canary is not None:
            self.canary.forget(seq_id)

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [sampling rows, vocab], decode rows first. Writes the rows' KV. For tests and benchmarks."""
        return self.model.forward(_batch(_ordered(rows)), self.cache, self.attention)

    def _copy(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Start the plan's copies. Returns the ids of all copies complete by now, and of the copies given up."""
        if self.copies is None:
            assert not plan.copies_out and not plan.copies_in, "this runner has no host pool"
            return [], []
        copies_failed: list[int] = []
        if plan.copies_out or plan.copies_in:
            try:
                if self.canary is not None:
                    self.canary.start(plan.copies_out, plan.copies_in)
                self.copies.start(plan.copies_out, plan.copies_in)
            except AssertionError:
                raise
            except Exception:  # the sequences of these copies replay what is lost; no other sequence is touched
                copies_failed = [copy.copy_id for copy in (*plan.copies_out, *plan.copies_in)]
                logger.exception("step %d: %d copies of KV raised and are given up", plan.step_id, len(copies_failed))
        elif not plan.rows:
            self.copies.wait()
        copies_done = self.copies.poll()
        if self.canary is not None and copies_done:
            try:
                spoiled = self.canary.done(copies_done)
            except AssertionError:
                raise
            except Exception:  # KV that could not be checked is not trusted: its sequences replay
                logger.exception(
                    "step %d: the KV canary raised; %d copies are given up", plan.step_id, len(copies_done)
                )
                return [], [*copies_failed, *copies_done]
            for seq_id, reason in spoiled.items():
                logger.error("sequence %d: %s", seq_id, reason)
            self._spoiled.update(spoiled)
        return copies_done, copies_failed

    def _try(self, rows: Sequence[Row], tried: _Tried) -> None:
        """Run `rows`, decode rows first. After an exception run each half by itself, down to the rows that cause it."""
        began = time.perf_counter_ns()
        try:
            tokens, failures = self._run(rows)
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever was raised, only the request that causes it may end
            raised = error
        else:
            tried.tokens.update(tokens)
            tried.failed.update(failures)
            tried.is_device_sound = True
            return
        # Outside the handler, and with the locals of the exception's frames cleared: these locals hold the attempt's
        # tensors, and the next attempt may need their memory.
        traceback.clear_frames(raised.__traceback__)
        tried.num_raised += 1
        tried.raised_ns += time.perf_counter_ns() - began
        if len(rows) == 1:
            self._give_up(rows[0], raised, tried)
            return
        logger.warning(
            "step %d: %d rows raised (%s); trying each half by itself", tried.step_id, len(rows), _reason(raised)
        )
        half = len(rows) // 2
        self._try(rows[:half], tried)
        self._try(rows[half:], tried)

    def _give_up(self, row: Row, raised: Exception, tried: _Tried) -> None:
        """Fail the row that raised alone. Raises `raised` instead if the device is broken."""
        if not tried.is_device_sound:
            began = time.perf_counter_ns()
            self._check_device(row, raised)
            tried.raised_ns += time.perf_counter_ns() - began
            tried.is_device_sound = True
        logger.error("step %d: sequence %d fails alone", tried.step_id, row.seq_id, exc_info=raised)
        tried.failed[row.seq_id] = _reason(raised)
        tried.raised.append(row.seq_id)

    def _check_device(self, row: Row, raised: Exception) -> None:
        """Run one harmless token in the first block of `row`. The row's sequence ends, so it needs its KV no more.

        Raises `raised` when the harmless token does not run either.
        """
        harmless = Row(_PROBE_SEQ_ID, False, 0, (0,), row.block_table[:1], True, SamplingParams(temperature=0.0), 0)
        try:
            self._run([harmless])
        except Exception as error:
            logger.critical("the device is broken: not even one harmless token runs", exc_info=error)
            raise raised from error

    def _run(self, rows: Sequence[Row]) -> tuple[dict[int, int], dict[int, str]]:
        ordered = _ordered(rows)
        with torch.inference_mode():
            logits = self.model.forward(_batch(ordered), self.cache, self.attention)
            sampled = [row for row in ordered if row.samples]
            draws = [
                Draw(row.sampling, row.start + len(row.token_ids), row.num_generated, self.eos_token_ids)
                for row in sampled
            ]
            ids, errors = sample(logits, draws, self.num_tokens) if draws else ([], [])
        pairs = list(zip(sampled, ids, errors, strict=True))
        tokens = {row.seq_id: token_id for row, token_id, error in pairs if not error}
        return tokens, {row.seq_id: error for row, _, error in pairs if error}

    def _fault(self, row: Row) -> str:
        """Why this row cannot run, or "". Checked before the batch is built, so that the fault harms no other row."""
        if row.seq_id in self._spoiled:
            return self._spoiled[row.seq_id]
        end = row.start + len(row.token_ids)
        if not row.token_ids or (row.is_decode and len(row.token_ids) != 1):
            return f"a row of {len(row.token_ids)} tokens cannot run"
        if min(row.token_ids) < 0 or max(row.token_ids) >= self.model.config.vocab_size:
            return f"a token id is outside the vocabulary of {self.model.config.vocab_size}"
        if end > self.model.config.context_len:
            return f"position {end - 1} is outside the context of {self.model.config.context_len} tokens"
        if len(row.block_table) * self.cache.block_size < end:
            return f"{len(row.block_table)} KV blocks do not hold {end} tokens"
        if min(row.block_table) < 0 or max(row.block_table) >= self.cache.num_blocks:
            return f"a KV block is outside the pool of {self.cache.num_blocks}"
        return ""


def _ordered(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.is_decode] + [row for row in rows if not row.is_decode]


def _blame(tried: _Tried, most_us: int) -> dict[int, int]:
    """seq_id -> the microseconds that a row which raised alone pays for the attempts that raised.

    The rows that raised alone pay equal parts, at most `most_us` in all. With two such rows, and attempts that took
    900 us, each pays 450 us. If every row ran in the end, no row is to blame, and all rows share the step's time.
    """
    count = len(tried.raised)
    part_us = min(tried.raised_ns // 1000, most_us) // count if count else 0
    return dict.fromkeys(tried.raised, part_us) if part_us else {}


def _reason(error: Exception) -> str:
    """One line for the client and the log: the exception's class and the first line of its text, cut if long."""
    lines = str(error).splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:REASON_CHARS_MAX]


def _batch(ordered: Sequence[Row]) -> Batch:
    token_ids: list[int] = []
    sample_rows: list[int] = []
    for row in ordered:
        token_ids.extend(row.token_ids)
        if row.samples:
            sample_rows.append(len(token_ids) - 1)
    spans = [(row.is_decode, Span(row.start, len(row.token_ids), row.block_table)) for row in ordered]
    return Batch(
        token_ids=token_ids,
        decode=tuple(span for is_decode, span in spans if is_decode),
        prefill=tuple(span for is_decode, span in spans if not is_decode),
        sample_rows=sample_rows,
    )
