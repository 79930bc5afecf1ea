"""TorchRunner: does what a StepPlan says with a real model. Its only state is the KV in the blocks.

A plan's copies out start first, then its copies in, then its rows run. A copy is over when a result names it, which may
be a later plan's; rows never touch blocks of a copy that is not over, so the order inside a step is free to change.
"""

import logging
import time
from collections.abc import Sequence

import torch

from engine.attention import Span
from engine.copy_engine import CopyEngine, SyncCopy
from engine.kv_cache import KVCache
from engine.kv_canary import KVCanary
from engine.model import Batch, Model
from engine.plan import Row, StepPlan, StepResult
from engine.sampler import Draw, sample

logger = logging.getLogger(__name__)


class TorchRunner:
    """Runs steps on one device. Implements the Runner protocol of `engine.core`."""

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
        """`num_tokens`: ids the tokenizer knows; the embedding may have more rows, which are never sampled.

        `copies`: None is SyncCopy when the cache has a host pool. `canary`: checks that swapped KV comes back whole.
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
        self._spoiled: dict[int, str] = {}  # sequences whose KV came back changed: none of their rows may run

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the plan's copies, run its rows and sample. A fault that one row causes fails that row; the others get
        their tokens. A plan without anything waits for a copy in flight. Copies without a host pool are a bug of the
        caller.
        """
        started = time.perf_counter_ns()
        copies_done = self._copy(plan)
        copy_us = (
            (time.perf_counter_ns() - started) // 1000 if plan.copies_out or plan.copies_in or not plan.rows else 0
        )
        failed = {row.seq_id: fault for row in plan.rows if (fault := self._fault(row))}
        rows = [row for row in plan.rows if row.seq_id not in failed]
        tokens: dict[int, int] = {}
        if rows:
            try:
                tokens, failures = self._run(rows)
            except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError, also for out of memory
                logger.warning("step %d failed (%s); running its %d rows one by one", plan.step_id, error, len(rows))
                tokens, failures = self._run_alone(rows)
            failed.update(failures)
        duration_us = max(1, (time.perf_counter_ns() - started) // 1000)
        return StepResult(plan.step_id, duration_us, tokens, failed, copies_done, copy_us)

    def release(self, seq_id: int) -> None:
        """A sequence is gone. Its blocks are cleared when they get their first token under a new owner."""
        self._spoiled.pop(seq_id, None)
        if self.canary is not None:
            self.canary.forget(seq_id)

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits of the rows that sample, in the order decode rows first; writes KV. For tests and benchmarks."""
        return self.model.forward(_batch(_ordered(rows)), self.cache, self.attention)

    def _copy(self, plan: StepPlan) -> list[int]:
        """Start the plan's copies; the ids of all that are over by now."""
        if self.copies is None:
            assert not plan.copies_out and not plan.copies_in, "this runner has no host pool"
            return []
        if plan.copies_out or plan.copies_in:
            if self.canary is not None:
                self.canary.start(plan.copies_out, plan.copies_in)
            self.copies.start(plan.copies_out, plan.copies_in)
        elif not plan.rows:
            self.copies.wait()
        copies_done = self.copies.poll()
        if self.canary is not None and copies_done:
            spoiled = self.canary.done(copies_done)
            for seq_id, reason in spoiled.items():
                logger.error("sequence %d: %s", seq_id, reason)
            self._spoiled.update(spoiled)
        return copies_done

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

    def _run_alone(self, rows: Sequence[Row]) -> tuple[dict[int, int], dict[int, str]]:
        tokens: dict[int, int] = {}
        failed: dict[int, str] = {}
        for row in rows:
            try:
                row_tokens, row_failed = self._run([row])
            except (RuntimeError, MemoryError) as error:
                failed[row.seq_id] = str(error).splitlines()[0] or type(error).__name__
            else:
                tokens.update(row_tokens)
                failed.update(row_failed)
        return tokens, failed

    def _fault(self, row: Row) -> str:
        """Why this row cannot run, or "". Checked before the batch is built, so that it harms nobody else."""
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
