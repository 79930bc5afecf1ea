"""Choose tokens from logits, without any generator state.

For each token one uniform number is drawn: u = hash(seed, absolute position of the new token). The logits are filtered,
in the order of vLLM and transformers: temperature, then top-k, then top-p. The token is the first in vocabulary order
whose cumulative probability over what is left, in float32, exceeds u. Ties go to the lower id.

So a token depends on its logits, the seed and the position alone. Pausing, batching and restarting cannot change it,
and two requests with the same seed and prompt agree at any load.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling import float32_temperature
from engine.wire.messages import SamplingParams

ARGMAX_BLOCK = 128  # argmax runs in two stages, since torch's own is several times slower on bfloat16 than its amax
NUCLEUS_FIRST_TRY = 256  # how many of the largest logits the search for the nucleus looks at first


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides one row's token, beside its logits."""

    sampling: SamplingParams
    position: int  # absolute position of the new token
    num_generated: int
    eos_token_ids: tuple[int, ...]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits, taken from BLAKE2b(seed, position)."""
    message = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 40) / 2**24


def sample(logits: torch.Tensor, draws: Sequence[Draw], num_tokens: int) -> tuple[list[int], list[str]]:
    """Sample one token id for each row of `logits` [rows, vocab]. Returns the ids and each row's error ("" if none).

    `num_tokens` is the number of ids that the tokenizer knows; later columns are padding, and never sampled. May change
    `logits` in place. Each row is computed on its own, or by operations that keep rows independent.
    """
    logits = logits[:, :num_tokens]
    for row, draw in enumerate(draws):
        banned = _banned(draw, num_tokens)
        if banned:
            logits[row, banned] = -math.inf
    greedy_ids, peaks = argmax(logits)
    finite = torch.isfinite(peaks).tolist()
    ids = greedy_ids.tolist()
    errors = ["" if ok else "the model computed no finite logits for this sequence" for ok in finite]
    for row, draw in enumerate(draws):
        if finite[row] and not is_greedy(draw.sampling):
            ids[row] = _sample_row(logits[row], draw, ids[row])
    return ids, errors


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the largest logit is taken, whatever the seed."""
    return float32_temperature(sampling.temperature) == 0 or sampling.top_k == 1


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of [rows, vocab]: the lowest id with the largest logit, and that logit (NaN if the row has any)."""
    vocab = logits.shape[1]
    whole = vocab // ARGMAX_BLOCK * ARGMAX_BLOCK
    if whole == 0 or logits.dtype == torch.float32:
        peaks, ids = logits.max(dim=-1)
        return ids, peaks
    blocks = logits[:, :whole].unflatten(1, (-1, ARGMAX_BLOCK))
    block_peaks = blocks.amax(dim=-1)
    best = block_peaks.argmax(dim=-1, keepdim=True)
    inside = blocks.gather(1, best.unsqueeze(-1).expand(-1, -1, ARGMAX_BLOCK)).squeeze(1)
    ids = best.squeeze(1) * ARGMAX_BLOCK + inside.argmax(dim=-1)
    peaks = block_peaks.gather(1, best).squeeze(1)
    if whole < vocab:
        tail_peaks, tail_ids = logits[:, whole:].max(dim=-1)
        is_tail = (tail_peaks > peaks) | torch.isnan(tail_peaks)
        ids, peaks = torch.where(is_tail, tail_ids + whole, ids), torch.where(is_tail, tail_peaks, peaks)
    return ids, peaks


def _banned(draw: Draw, num_tokens: int) -> list[int]:
    """The ids that would end a sequence, as long as it has not generated its min_tokens; none afterwards."""
    if draw.num_generated >= draw.sampling.min_tokens:
        return []
    return [i for i in {*draw.eos_token_ids, *draw.sampling.stop_token_ids} if 0 <= i < num_tokens]


def _sample_row(logits: torch.Tensor, draw: Draw, greedy_id: int) -> int:
    sampling = draw.sampling
    plain = logits.float()
    # Which logits are largest is read from the logits themselves: a huge temperature makes different ones equal.
    if 0 < sampling.top_k < plain.numel():
        plain = _keep_largest(plain, sampling.top_k)
    # Subtract the peak first, so that a tiny temperature gives large negative numbers and never infinity - infinity.
    peak, temperature = logits[greedy_id].float(), float32_temperature(sampling.temperature)
    scaled = (plain - peak) / temperature
    if sampling.top_p < 1:
        scaled = (_keep_largest(plain, nucleus_size(scaled, sampling.top_p)) - peak) / temperature
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    target = cumulative[-1] * uniform(sampling.seed, draw.position)
    chosen = int(torch.searchsorted(cumulative, target, right=True))
    if chosen >= scaled.numel():  # u * total was rounded up to the total: take the last token of any probability
        chosen = int(torch.searchsorted(cumulative, cumulative[-1]))
    return chosen


def nucleus_size(scaled: torch.Tensor, top_p: float) -> int:
    """How many of the most likely tokens together reach probability `top_p`; at least 1. `scaled` is [vocab]."""
    log_total = scaled.logsumexp(dim=-1)
    width = min(NUCLEUS_FIRST_TRY, scaled.numel())
    while True:
        cumulative = (scaled.topk(width).values - log_total).exp().cumsum(dim=-1)
        size = int((cumulative < top_p).sum()) + 1
        if size <= width or width == scaled.numel():
            return min(size, width)
        width = min(8 * width, scaled.numel())


def _keep_largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Mask all logits but the `count` largest. Among equal logits at the edge, those of lower ids stay."""
    edge = logits.topk(count).values[-1]
    above = logits > edge
    ties = logits == edge
    kept = above | (ties & (ties.cumsum(dim=-1) <= count - above.sum()))
    return logits.masked_fill(~kept, -math.inf)
