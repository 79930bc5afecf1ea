"""Attention by gathering blocks into one run and calling torch's scaled_dot_product_attention. Runs on any device.

Query heads that share a KV head are folded into the query dimension, so grouped-query attention needs no repeated keys.

How rows stay independent of each other (`padding_granularity` checks decode rows at load; tests check both kinds):

* Decode rows run in a few batches of similar length. Each row sees its own context; the rest of the batch's KV length
  is masked. That length is padded to a multiple for which the kernel's sums were found not to change when the padding
  grows. If there is no such multiple, each row runs alone, padded by its own length only. An example is float32 with
  several threads, where MKL's kernel depends on the alignment of each thread's buffer.
* Prompt rows run in query tiles at *absolute* positions [k*T, (k+1)*T), with keys [0, (k+1)*T). The shape of the call
  is a function of the tile alone, so it does not matter where chunks begin or end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.device.attention import Span
from engine.device.kv_cache import KVCache
from engine.device.row_classes import cancelling
from engine.models.config import ModelConfig

QUERY_TILE = 64
GRANULARITIES = (16, 32, 64, 128, 256, 512)
CALL_TOKENS = 128  # one more call costs as much as reading the KV of this many tokens for one row


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that run as one call, all with the same padded KV length."""

    rows: torch.Tensor | slice  # which of the step's rows
    block_index: torch.Tensor  # [rows * blocks]
    mask: torch.Tensor  # [rows, 1, 1, kv_len]: 0 or -inf
    num_rows: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's prompt tokens of this step."""

    first_row: int
    count: int
    offset: int  # of the first token inside its query tile
    first_tile: int
    num_tiles: int
    block_index: torch.Tensor  # whole tiles of KV


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The calls of one step, the same at each layer."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]


class GatherSdpa:
    """The attention backend for every device and type, without compiled kernels of our own."""

    name = "gather-sdpa"

    def __init__(self, config: ModelConfig, cache: KVCache, granularity: int | None = None) -> None:
        """`granularity`: the multiple that decode KV lengths are padded to. 0: each row runs alone. None: probe."""
        self.cache = cache
        self.kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.dtype, self.device = cache.pool.dtype, cache.pool.device
        self.tile = math.lcm(QUERY_TILE, cache.block_size)
        if granularity is None:
            granularity = padding_granularity(config, self.dtype, self.device)
        self.is_batched = granularity > 0
        self.granularity = math.lcm(granularity or 64, cache.block_size)
        # Each tile's causal mask is the right end of this mask: keys left of the tile are all visible.
        longest = -(-config.context_len // self.tile) * self.tile
        mask = torch.zeros((self.tile, 1, longest), dtype=self.dtype, device=self.device)
        future = torch.ones((self.tile, self.tile), dtype=torch.bool, device=self.device).triu(1)
        mask[:, 0, longest - self.tile :].masked_fill_(future, -math.inf)
        self._tile_mask = mask.expand(-1, self.group, -1).reshape(self.tile * self.group, longest)

    def plan(self, decode: Sequence[Span], prefill: Sequence[Span]) -> GatherPlan:
        """See AttentionBackend.plan."""
        return GatherPlan(self._decode_groups(decode), self._chunks(prefill, len(decode)))

    def attend(self, layer: int, queries: torch.Tensor, plan: GatherPlan) -> torch.Tensor:
        """See AttentionBackend.attend."""
        out = torch.empty_like(queries)
        for group in plan.decode:
            self._attend_decode(layer, queries, out, group)
        for chunk in plan.prefill:
            self._attend_chunk(layer, queries, out, chunk)
        return out

    def _attend_decode(self, layer: int, queries: torch.Tensor, out: torch.Tensor, group: DecodeGroup) -> None:
        keys, values = self.cache.gather(layer, group.block_index)
        shape = (group.num_rows, -1, self.kv_heads, self.head_dim)
        folded = queries[group.rows].view(group.num_rows, self.kv_heads, self.group, self.head_dim)
        result = scaled_dot_product_attention(
            folded,  # [rows, kv_heads, group, head_dim]
            keys.view(shape).transpose(1, 2),  # [rows, kv_heads, kv_len, head_dim]
            values.view(shape).transpose(1, 2),
            attn_mask=group.mask.expand(-1, -1, self.group, -1),
        )
        out[group.rows] = result.reshape(group.num_rows, -1, self.head_dim)

    def _attend_chunk(self, layer: int, queries: torch.Tensor, out: torch.Tensor, chunk: PrefillChunk) -> None:
        keys, values = self.cache.gather(layer, chunk.block_index)
        keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        rows = slice(chunk.first_row, chunk.first_row + chunk.count)
        if chunk.count == chunk.num_tiles * self.tile:
            padded = queries[rows]
        else:
            padded = queries.new_zeros((chunk.num_tiles * self.tile, *queries.shape[1:]))
            padded[chunk.offset : chunk.offset + chunk.count] = queries[rows]
        # [tiles, kv_heads, tile * group, head_dim]
        folded = (
            padded.view(chunk.num_tiles, self.tile, self.kv_heads, self.group, self.head_dim)
            .transpose(1, 2)
            .reshape(chunk.num_tiles, self.kv_heads, self.tile * self.group, self.head_dim)
        )
        results = []
        for i in range(chunk.num_tiles):
            kv_len = (chunk.first_tile + i + 1) * self.tile
            mask = self._tile_mask[:, self._tile_mask.shape[1] - kv_len :]
            results.append(
                scaled_dot_product_attention(
                    folded[i : i + 1], keys[:, :, :kv_len], values[:, :, :kv_len], attn_mask=mask[None, None]
                )
            )
        unfolded = (
            torch.cat(results)
            .view(chunk.num_tiles, self.kv_heads, self.tile, self.group, self.head_dim)
            .transpose(1, 2)
            .reshape(chunk.num_tiles * self.tile, -1, self.head_dim)
        )
        out[rows] = unfolded[chunk.offset : chunk.offset + chunk.count]

    def _decode_groups(self, spans: Sequence[Span]) -> tuple[DecodeGroup, ...]:
        if not self.is_batched:
            return tuple(self._group(slice(i, i + 1), [span], self._padded(span)) for i, span in enumerate(spans))
        lengths = [self._padded(span) for span in spans]
        groups = []
        for members in length_groups(lengths):
            rows = slice(0, len(spans)) if len(members) == len(spans) else torch.tensor(members, device=self.device)
            groups.append(self._group(rows, [spans[i] for i in members], max(lengths[i] for i in members)))
        return tuple(groups)

    def _padded(self, span: Span) -> int:
        return -(-span.end // self.granularity) * self.granularity

    def _group(self, rows: torch.Tensor | slice, spans: Sequence[Span], kv_len: int) -> DecodeGroup:
        visible = torch.arange(kv_len) < torch.tensor([span.end for span in spans]).unsqueeze(1)
        mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, -math.inf)
        return DecodeGroup(
            rows=rows,
            block_index=self._tables(spans, kv_len),
            mask=mask[:, None, None].to(self.device),
            num_rows=len(spans),
        )

    def _chunks(self, spans: Sequence[Span], first_row: int) -> tuple[PrefillChunk, ...]:
        chunks = []
        for span in spans:
            first_tile, last_tile = span.start // self.tile, (span.end - 1) // self.tile
            chunks.append(
                PrefillChunk(
                    first_row=first_row,
                    count=span.count,
                    offset=span.start - first_tile * self.tile,
                    first_tile=first_tile,
                    num_tiles=last_tile + 1 - first_tile,
                    block_index=self._tables([span], (last_tile + 1) * self.tile),
                )
            )
            first_row += span.count
        return tuple(chunks)

    def _tables(self, spans: Sequence[Span], kv_len: int) -> torch.Tensor:
        """Block indices of each span, cut to the blocks it uses and padded with the null block to `kv_len`."""
        num_blocks = kv_len // self.cache.block_size
        flat: list[int] = []
        for span in spans:
            used = -(-span.end // self.cache.block_size)
            flat.extend(span.block_table[:used])
            flat.extend([self.cache.null_block] * (num_blocks - used))
        return self.cache.block_index(torch.tensor(flat, device=self.device))


def length_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Which rows (by index, in order) should share a call. All rows of a group are padded to its longest row.

    A group holds rows of neighbouring lengths. The result is the partition of least cost, where a group costs
    `CALL_TOKENS` plus its rows times its longest length. With lengths [64, 64, 1024] the two short rows share a call:
    (128 + 2 * 64) + (128 + 1024) = 1,408 tokens, against 128 + 3 * 1024 = 3,200 for one call.
    """
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(length, []).append(row)
    distinct = sorted(by_length)
    costs, starts = [0], [0]  # at n: the least cost of the n shortest lengths, and where their last group starts
    for n in range(1, len(distinct) + 1):
        num_rows, best, best_start = 0, math.inf, 0
        for start in range(n - 1, -1, -1):
            num_rows += len(by_length[distinct[start]])
            cost = costs[start] + CALL_TOKENS + num_rows * distinct[n - 1]
            if cost < best:
                best, best_start = cost, start
        costs.append(int(best))
        starts.append(best_start)
    groups: list[list[int]] = []
    end = len(distinct)
    while end:
        groups.append(sorted(row for length in distinct[starts[end] : end] for row in by_length[length]))
        end = starts[end]
    return groups


def padding_granularity(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """The least granularity at which more masked padding never changes a decode row's bits; 0 if there is none.

    A granularity is a multiple that KV lengths are padded to. The probe also checks that a row's bits do not depend on
    the rows beside it. Its numbers cancel (see `row_classes.cancelling`) and lie as they do in the cache, so any
    other order of additions shows in the result.
    """
    probes = [_PaddingProbe(config, context, dtype, device) for context in (1, 7, 17, 40, 100, 200, 500)]
    for granularity in GRANULARITIES:
        if all(probe.holds(granularity) for probe in probes):
            return granularity
    return 0


class _PaddingProbe:
    """One context length: a row attending alone, beside others, and with ever more masked padding."""

    LONGEST = 1024

    def __init__(self, config: ModelConfig, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.context, self.dtype = context, dtype
        kv_heads, self.group, dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        rows = self.LONGEST
        queries, keys = cancelling(dim, kv_heads * rows, kv_heads * self.group)
        _, values = cancelling(context, kv_heads * dim, 1)
        # Scores are zero apart from a rounding error of about 0.01. Values sum to zero apart from what that error adds.
        self.queries = (300 * queries).to(device, dtype).view(1, kv_heads, self.group, dim)
        self.keys = (300 * keys).to(device, dtype).view(1, rows, kv_heads, dim)
        self.values = torch.zeros((1, rows, kv_heads, dim), dtype=dtype, device=device)
        self.values[0, :context] = values.t().reshape(context, kv_heads, dim).to(device, dtype)
        self.keys[:, context:] = 0

    def holds(self, granularity: int) -> bool:
        """Whether every padded length tried gives the bits of the shortest, in a batch of one row and of five rows."""
        shortest = -(-self.context // granularity) * granularity
        lengths = [shortest + extra * granularity for extra in (0, 1, 2, 3)] + [self.LONGEST]
        reference = self._attend(1, shortest)
        return all(
            torch.equal(self._attend(rows, length)[row], reference[0])
            for length in lengths
            if length <= self.LONGEST
            for rows in (1, 5)
            for row in {0, rows - 1}
        )

    def _attend(self, rows: int, kv_len: int) -> torch.Tensor:
        mask = torch.zeros(kv_len, dtype=self.dtype, device=self.keys.device)
        mask[self.context :] = -math.inf
        keys, values = (
            t[:, :kv_len].expand(rows, -1, -1, -1).contiguous().transpose(1, 2) for t in (self.keys, self.values)
        )
        queries = self.queries.expand(rows, -1, -1, -1).contiguous()
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask.expand(rows, 1, self.group, kv_len))
