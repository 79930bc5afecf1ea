"""Row classes: the probe finds kernels that depend on the row count, and the recipes hide them."""

import pytest
import torch
from torch.nn import functional as F

from engine.device.row_classes import (
    CANDIDATES,
    FIXED,
    FIXED_CLASSES,
    Recipe,
    RowClasses,
    RowFn,
    cancelling,
    decode_counts,
    is_invariant,
    prefill_counts,
    probe,
)

DECODE, PREFILL = decode_counts(64), prefill_counts(300)
ROWS, WEIGHT = cancelling(96, 40, 300)


def library(edges: tuple[int, ...]) -> RowFn:
    """A matrix product whose order of additions changes at each of these row counts."""

    def product(rows: torch.Tensor) -> torch.Tensor:
        pieces = 1 + sum(rows.shape[0] >= edge for edge in edges)
        # Each row on its own, so that nothing but `pieces` depends on the row count.
        return torch.stack([_in_pieces(row, pieces) for row in rows])

    return product


def _in_pieces(row: torch.Tensor, pieces: int) -> torch.Tensor:
    total = torch.zeros(WEIGHT.shape[0])
    for values, weights in zip(row.chunk(pieces), WEIGHT.chunk(pieces, dim=1), strict=True):
        total += (values * weights).sum(1)
    return total


def test_a_function_that_never_changes_runs_as_it_is() -> None:
    classes = probe("norm", lambda rows: rows * 2, ROWS, DECODE, PREFILL)
    assert classes.is_merged and classes.decode == Recipe()


@pytest.mark.parametrize(
    ("edges", "decode", "prefill", "is_merged"),
    [
        ((2,), Recipe(2), Recipe(2), True),  # one row alone is a matrix-vector product
        ((2, 4), Recipe(4), Recipe(4), True),
        ((33,), Recipe(1, 32), Recipe(1, 32), False),  # as AMX: up to 32 rows, and more
        ((2, 33), Recipe(4, 32), Recipe(4, 32), False),
    ],
)
def test_the_probe_finds_the_cheapest_recipe(
    edges: tuple[int, ...], decode: Recipe, prefill: Recipe, is_merged: bool
) -> None:
    classes = probe("linear", library(edges), ROWS, [1, 2, 3, 5, 32, 33, 40], [1, 3, 31, 33, 65])
    assert (classes.decode, classes.prefill, classes.is_merged) == (decode, prefill, is_merged)


@pytest.mark.case("Z1")
@pytest.mark.parametrize("period", [2, 4, 32])
def test_what_depends_on_a_rows_place_passes_no_probe(period: int) -> None:
    """The row count changes nothing here, so only moving rows to other places can show it."""

    def placed(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([_in_pieces(row, 1 + place % period) for place, row in enumerate(rows)])

    counts = [1, 2, 3, 31, 33, 70]
    assert not any(is_invariant(placed, ROWS, counts, recipe) for recipe in CANDIDATES)
    assert probe("odd", placed, ROWS, counts, [*counts, 65]) == FIXED_CLASSES


@pytest.mark.case("Z2")
def test_classes_that_differ_only_for_long_prompts_are_two() -> None:
    """No step decodes 50 rows, so decode rows never see the other kernel; prompts do."""
    classes = probe("linear", library((50,)), ROWS, [1, 2, 3, 5, 32, 33, 40], [1, 3, 31, 33, 65])
    assert classes == RowClasses(Recipe(), Recipe(1, 32), is_merged=False)
    reference = classes.run(library((50,)), ROWS[:1], 1)
    assert torch.equal(classes.run(library((50,)), ROWS[:65], 1)[:1], reference)


def test_what_changes_at_every_count_runs_in_fixed_tiles() -> None:
    def restless(rows: torch.Tensor) -> torch.Tensor:
        """Starts its sums at another column for every row count."""
        start = rows.shape[0]
        return torch.stack([(row.roll(start) * WEIGHT.roll(start, 1)).sum(1) for row in rows])

    classes = probe("odd", restless, ROWS, [1, 2, 3, 31, 32, 33, 70], [1, 33, 65, 70])
    assert classes == FIXED_CLASSES
    assert is_invariant(restless, ROWS, [1, 2, 3, 31, 32, 33, 40, 65], FIXED)


def test_two_classes_run_as_two_calls_and_keep_the_order() -> None:
    seen: list[int] = []

    def counting(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.shape[0])
        return rows + 1

    rows = torch.arange(100.0).unsqueeze(1)
    classes = probe("linear", library((33,)), ROWS, [1, 32, 33], [33, 65])
    assert torch.equal(classes.run(counting, rows, 3), rows + 1)
    assert sum(seen) == 100 and seen[0] == 3
    seen.clear()
    assert torch.equal(FIXED_CLASSES.run(counting, rows, 3), rows + 1)
    assert seen == [32, 32, 32, 32]


def test_cancelling_numbers_show_an_order_that_ordinary_ones_hide() -> None:
    """The reason for `cancelling`: in bfloat16 another order of additions is visible in hardly any ordinary result."""
    rows, weight = (t.to(torch.bfloat16) for t in cancelling(1536, 64, 4))
    forward, backward = (_summed(rows, weight, order) for order in (1, -1))
    assert (forward != backward).float().mean() > 0.5
    plain = torch.randn((4, 1536), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    forward, backward = (_summed(plain, weight.abs(), order) for order in (1, -1))
    assert (forward != backward).float().mean() < 0.05


def _summed(rows: torch.Tensor, weight: torch.Tensor, order: int) -> torch.Tensor:
    products = (rows.float().unsqueeze(1) * weight.float()).unflatten(-1, (-1, 64)).sum(-1)
    total = torch.zeros(products.shape[:2])
    for i in range(products.shape[2])[::order]:
        total += products[..., i]
    return total.to(torch.bfloat16)


@pytest.mark.parametrize("features", [(64, 96), (65, 7), (20, 160)])
def test_cancelling_products_are_nearly_zero(features: tuple[int, int]) -> None:
    rows, weight = cancelling(*features, 5)
    assert rows.shape == (5, features[0])
    assert weight.shape == (features[1], features[0])
    assert F.linear(rows, weight).abs().max() < 1e-3
