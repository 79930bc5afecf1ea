"""Row classes: how to run a row-wise function so that a row's bits never depend on how many rows ran beside it.

A GEMM library picks its kernel by the number of rows, and two kernels round differently. So generated tokens always run
in the *decode class* and prompt tokens in the *prefill class*. Each class has a recipe: every call gets at least so
many rows (by padding), and at most so many (by cutting into tiles).

The recipes of a function are found at load: the row counts that will be used are run, and their bits compared. If one
recipe works for both classes, both run as one call. A function that passes no probe runs in fixed tiles: there each
call has the same shape, so a row's bits cannot change.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

RowFn = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out], row by row

FIXED_TILE = 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """Pad a call to `min_rows` rows, and put at most `max_rows` in one call (0: any number)."""

    min_rows: int = 1
    max_rows: int = 0

    def run(self, fn: RowFn, rows: torch.Tensor) -> torch.Tensor:
        """fn over `rows` [rows, in], in calls of the shapes that this recipe allows."""
        count = rows.shape[0]
        if self.max_rows and count > self.max_rows:
            return torch.cat([self.run(fn, part) for part in rows.split(self.max_rows)])
        if count < self.min_rows:
            padded = rows.new_zeros((self.min_rows, *rows.shape[1:]))
            padded[:count] = rows
            return fn(padded)[:count]
        return fn(rows)


FIXED = Recipe(FIXED_TILE, FIXED_TILE)
# In order of cost, cheapest first. The first recipe calls the library as it is.
CANDIDATES = (
    *(Recipe(n) for n in (1, 2, 4, 8, 16)),
    *(Recipe(n, FIXED_TILE) for n in (1, 4, 16)),
    *(Recipe(n) for n in (32, 64)),
)


@dataclass(frozen=True, slots=True)
class RowClasses:
    """The recipes of one function. With `is_merged`, the classes have one recipe and run as one call."""

    decode: Recipe
    prefill: Recipe
    is_merged: bool

    def run(self, fn: RowFn, rows: torch.Tensor, num_decode: int) -> torch.Tensor:
        """fn over packed rows, of which the first `num_decode` are decode rows and the rest prompt tokens."""
        if self.is_merged or num_decode == rows.shape[0]:
            return self.decode.run(fn, rows)
        if num_decode == 0:
            return self.prefill.run(fn, rows)
        return torch.cat([self.decode.run(fn, rows[:num_decode]), self.prefill.run(fn, rows[num_decode:])])


UNBOUND_CLASSES = RowClasses(Recipe(), Recipe(), is_merged=True)  # for functions that compute row by row themselves
FIXED_CLASSES = RowClasses(FIXED, FIXED, is_merged=True)


def decode_counts(max_rows: int) -> list[int]:
    """Row counts to probe for steps of up to `max_rows` decode rows: all small counts, and those around tile edges."""
    edges = {edge + d for edge in range(16, max_rows + 1, 8) for d in (-1, 0, 1)}
    return sorted(n for n in {*range(1, 18), *edges, max_rows} if n <= max_rows)


def prefill_counts(max_tokens: int) -> list[int]:
    """Row counts to probe for steps of up to `max_tokens` prompt tokens."""
    edges = {edge + d for edge in (32, 64, 96, 128, 256, 512, 1024) for d in (-1, 0, 1)}
    return sorted(n for n in {*range(1, 18), *edges, 24, 40, 48, 80, 160, 192, 320, max_tokens} if n <= max_tokens)


def cancelling(in_features: int, out_features: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [num_rows, in] and a weight [out, in] whose products sum to nothing but rounding error.

    That error shows the order in which a kernel adds. With ordinary numbers another order changes only one bfloat16
    result in some thousands, so a probe would pass, and tokens would differ a thousand steps later. Here each term has
    a partner of the opposite sign at a random place.
    """
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    order = torch.randperm(2 * half, generator=generator)
    rows = torch.randn((num_rows, half), generator=generator).repeat(1, 2)
    weight = torch.randn((out_features, half), generator=generator).repeat(1, 2)
    weight[:, half:].neg_()
    pad = (0, in_features - 2 * half)
    return tuple(torch.nn.functional.pad(t[:, order], pad).contiguous() for t in (rows, weight))  # type: ignore[return-value]


def is_invariant(fn: RowFn, sample: torch.Tensor, counts: Sequence[int], recipe: Recipe) -> bool:
    """Whether a row of `fn` has the same bits in calls of every row count, and at another place in the call.

    `sample` holds at least max(counts) rows.
    """
    reference = recipe.run(fn, sample[: max(counts)])
    for count in counts:
        # A second start tries each row at another place.
        for start in {0, max(counts) - count}:
            got = recipe.run(fn, sample[start : start + count].clone())
            if not torch.equal(got, reference[start : start + count]):
                return False
    return True


def probe(name: str, fn: RowFn, sample: torch.Tensor, decode: Sequence[int], prefill: Sequence[int]) -> RowClasses:
    """Find the cheapest recipes for `fn`, and log them. `prefill` may be empty if `fn` only ever gets decode rows."""
    both = sorted({*decode, *prefill})
    classes = FIXED_CLASSES
    for recipe in CANDIDATES:
        if recipe.max_rows == 0 and recipe.min_rows <= 8 and is_invariant(fn, sample, both, recipe):
            classes = RowClasses(recipe, recipe, is_merged=True)
            break
    else:
        decode_recipe = _first(fn, sample, decode)
        prefill_recipe = _first(fn, sample, prefill) if prefill else decode_recipe
        if decode_recipe != FIXED or prefill_recipe != FIXED:
            classes = RowClasses(decode_recipe, prefill_recipe, is_merged=False)
    logger.info("row classes of %s: %s", name, classes)
    return classes


def _first(fn: RowFn, sample: torch.Tensor, counts: Sequence[int]) -> Recipe:
    return next((recipe for recipe in CANDIDATES if is_invariant(fn, sample, counts, recipe)), FIXED)
