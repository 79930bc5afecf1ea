"""The sampler: its distribution, its filters at their edges, its seeds, and rows that do not see one another."""

import math
from collections import Counter

import pytest
import torch

from engine.device.sampler import Draw, argmax, is_greedy, nucleus_size, sample, uniform
from engine.wire.messages import SamplingParams


def draw(position: int = 0, num_generated: int = 0, eos: tuple[int, ...] = (), **sampling: object) -> Draw:
    return Draw(SamplingParams(**sampling), position, num_generated, eos)  # type: ignore[arg-type]


def tokens(logits: torch.Tensor, draws: list[Draw], num_tokens: int | None = None) -> list[int]:
    ids, errors = sample(logits.clone(), draws, num_tokens or logits.shape[1])
    assert errors == [""] * len(draws)
    return ids


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, 1.5])
    probabilities = (logits / temperature).softmax(-1).tolist()
    count = 6000
    ids = tokens(
        logits.expand(count, -1), [draw(seed=i, position=i % 97, temperature=temperature) for i in range(count)]
    )
    counted = Counter(ids)
    # 5 degrees of freedom: 20.5 is exceeded by chance once in a thousand; the seeds are fixed.
    assert chi_square([counted[i] for i in range(6)], probabilities) < 20.5


def test_uniforms_are_spread_evenly_over_seeds_and_positions() -> None:
    values = [uniform(seed, position) for seed in range(100) for position in range(100)]
    counted = Counter(int(value * 16) for value in values)
    assert chi_square([counted[i] for i in range(16)], [1 / 16] * 16) < 37.7  # 15 degrees of freedom, 0.1 %
    assert all(0 <= value < 1 for value in values)


@pytest.mark.case("K60")
def test_each_position_draws_anew_and_a_seed_repeats() -> None:
    logits = torch.zeros((64, 500))
    first = tokens(logits, [draw(seed=7, position=p) for p in range(64)])
    assert first == tokens(logits, [draw(seed=7, position=p) for p in range(64)])
    assert len(set(first)) > 40


def test_different_seeds_give_different_tokens() -> None:
    logits = torch.zeros((3, 5000))
    assert len(set(tokens(logits, [draw(seed=s, position=5) for s in (7, 8, 9)]))) >= 2


@pytest.mark.case("K60")
def test_a_row_does_not_see_the_rows_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((6, 700), generator=generator) * 3
    draws = [
        draw(seed=1, position=9, temperature=0.0),
        draw(seed=2, position=9, temperature=1.0),
        draw(seed=3, position=9, temperature=0.7, top_k=20),
        draw(seed=4, position=9, temperature=1.3, top_p=0.8),
        draw(seed=5, position=9, temperature=1.0, top_k=50, top_p=0.5),
        draw(seed=6, position=9, min_tokens=4, eos=(int(logits[5].argmax()),)),
    ]
    together = tokens(logits, draws)
    assert together == [tokens(logits[i : i + 1], [draws[i]])[0] for i in range(6)]
    assert together[::-1] == tokens(logits.flip(0), draws[::-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 128, 300, 49152])
def test_argmax_takes_the_lowest_of_equals(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(0, 6, (8, vocab), generator=generator).to(dtype)
    ids, peaks = argmax(logits)
    for row in range(8):
        values = logits[row].tolist()
        assert peaks[row] == max(values)
        assert ids[row] == values.index(max(values))


def test_top_k_one_and_temperature_zero_are_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    for sampling in ({"temperature": 0.0}, {"temperature": 5.0, "top_k": 1}):
        assert all(tokens(logits, [draw(seed=s, **sampling)]) == [1] for s in range(20))
    assert not is_greedy(SamplingParams(temperature=1.0))


def test_top_k_keeps_exactly_k_also_among_equals() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]).expand(400, -1)
    seen = set(tokens(logits, [draw(seed=i, top_k=2) for i in range(400)]))
    assert seen == {1, 2}  # of the three equals the lower ids stay
    everything = tokens(logits, [draw(seed=i, top_k=100) for i in range(400)])
    assert everything == tokens(logits, [draw(seed=i) for i in range(400)])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert [nucleus_size(logits, p) for p in (1e-9, 0.4, 0.6, 0.8, 0.99)] == [1, 1, 2, 3, 4]
    seen = set(tokens(logits.expand(400, -1), [draw(seed=i, top_p=0.6) for i in range(400)]))
    assert seen == {0, 1}


def test_top_p_finds_a_nucleus_wider_than_its_first_look() -> None:
    flat = torch.zeros(5000)
    assert nucleus_size(flat, 0.5) == pytest.approx(2500, abs=2)
    assert nucleus_size(flat, 0.999999) > 4990


@pytest.mark.case("K62")
def test_a_tiny_temperature_neither_overflows_nor_fails() -> None:
    logits = torch.tensor([[300.0, -300.0, 299.0], [3e4, -3e4, -math.inf]])
    draws = [draw(seed=1, temperature=1e-6), draw(seed=2, temperature=1e-30, top_p=0.5)]
    assert tokens(logits, draws) == [0, 0]


def test_min_tokens_keeps_every_end_away() -> None:
    logits = torch.tensor([[5.0, 9.0, 1.0, 8.0]])
    sampling = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (3,)}
    assert tokens(logits, [draw(num_generated=2, eos=(1,), **sampling)]) == [0]
    assert tokens(logits, [draw(num_generated=3, eos=(1,), **sampling)]) == [1]
    ignoring = {**sampling, "ignore_eos": True}
    assert tokens(logits, [draw(num_generated=2, eos=(1,), **ignoring)]) == [0]


@pytest.mark.case("K54")
def test_padded_vocabulary_rows_are_never_chosen() -> None:
    logits = torch.zeros((300, 40))
    logits[:, 30:] = 50.0
    draws = [draw(seed=i, temperature=float(i % 2)) for i in range(300)]
    assert max(tokens(logits, draws, num_tokens=30)) < 30


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 250, 256, 299])  # 256 and above are behind the last whole block of argmax
@pytest.mark.case("Y4")
def test_a_row_without_finite_logits_fails_alone(bad: float, dtype: torch.dtype, at: int) -> None:
    logits = torch.zeros((3, 300), dtype=dtype)
    logits[:, 7] = 1.0
    logits[1, at] = bad
    ids, errors = sample(logits, [draw(temperature=0.0)] * 3, 300)
    assert ids[0] == ids[2] == 7
    assert [bool(error) for error in errors] == [False, True, False]


@pytest.mark.case("Y1")
@pytest.mark.parametrize("drawn", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.99}, {}])
def test_a_token_of_probability_0_is_never_drawn(
    monkeypatch: pytest.MonkeyPatch, drawn: float, filters: dict[str, float]
) -> None:
    """At both ends of the numbers that a draw can have; the last id's probability underflows to 0."""
    monkeypatch.setattr("engine.device.sampler.uniform", lambda seed, position: drawn)
    logits = torch.tensor([[-120.0, 1.0, 2.0, 1.5, -120.0], [-math.inf, -math.inf, 0.0, 0.0, -math.inf]])
    draws = [draw(seed=1, **filters), draw(seed=1, **filters)]
    probable = [{1, 3}, {2, 3}]
    for token, allowed in zip(tokens(logits, draws), probable, strict=True):
        assert token in allowed
        assert token == (min(allowed) if drawn == 0.0 else max(allowed))


def test_a_draw_that_rounds_up_to_the_total_is_the_last_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.sampler.uniform", lambda seed, position: 1.0)
    logits = torch.tensor([[0.0, 1.0, 0.5, -200.0, -math.inf]])
    assert tokens(logits, [draw(seed=1)]) == [2]
