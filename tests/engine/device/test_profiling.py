"""The step profile: the fit recovers what made the times, no part is negative, and a kept one must fit its key."""

import json
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.device.profiling import (
    ProfileKey,
    StepShape,
    fit,
    load_or_measure,
    measure_all,
    plan_of,
    read_profile,
    step_shapes,
)
from engine.plan import StepPlan, StepResult
from policies.cost import StepProfile

TRUE = StepProfile(25000.0, 1200.0, 0.3, 900.0, 5.0)
KEY = ProfileKey("ab" * 32, "cpu Some Model", 1, "bfloat16", "2.13.0")


def model_time(profile: StepProfile, shape: StepShape) -> float:
    return (
        profile.fixed_us
        + profile.prefill_marginal_us(shape.prefill_start, shape.prefill_tokens)
        + shape.decode_rows * profile.decode_marginal_us(shape.decode_context)
    )


class ClockedRunner:
    """Takes as long as `profile` says; all but every `quiet`-th step longer, by up to ten times."""

    def __init__(self, profile: StepProfile, num_blocks: int = 4096, context: int = 8192, quiet: int = 1) -> None:
        self.profile, self.quiet = profile, quiet
        self.cache: Any = SimpleNamespace(num_blocks=num_blocks, block_size=16)
        self.model: Any = SimpleNamespace(config=SimpleNamespace(context_len=context))
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        total = self.profile.fixed_us
        for row in plan.rows:
            assert len(row.block_table) * 16 >= row.start + len(row.token_ids)
            assert all(block < self.cache.num_blocks for block in row.block_table)
            if row.is_decode:
                total += self.profile.decode_marginal_us(row.start + 1)
            else:
                total += self.profile.prefill_marginal_us(row.start, len(row.token_ids))
        factor = 1 + self.num_steps % self.quiet * 9 / self.quiet
        return StepResult(plan.step_id, round(total * factor), {})


@pytest.mark.parametrize("quiet", [1, 3])
def test_when_most_steps_are_disturbed_the_profile_is_recovered(tmp_path: Path, quiet: int) -> None:
    """A neighbour only ever adds time: with two of three steps disturbed a median would be wrong."""
    runner: Any = ClockedRunner(TRUE, quiet=quiet)
    assert astuple(load_or_measure(runner, KEY, tmp_path, 64)) == pytest.approx(astuple(TRUE), rel=1e-3)


def test_no_part_is_negative_and_the_rest_still_fits() -> None:
    shapes = step_shapes(ClockedRunner(TRUE), 64)  # type: ignore[arg-type]
    shrinking = replace(TRUE, decode_context_us=-0.5)
    profile = fit(shapes, [round(model_time(shrinking, shape)) for shape in shapes])
    assert profile.decode_context_us == 0
    assert min(astuple(profile)) >= 0
    assert profile.prefill_token_us == pytest.approx(TRUE.prefill_token_us, rel=0.05)


def test_the_profile_is_measured_once_for_each_key(tmp_path: Path) -> None:
    runner: Any = ClockedRunner(TRUE)
    first = load_or_measure(runner, KEY, tmp_path, 64)
    steps = runner.num_steps
    assert load_or_measure(runner, KEY, tmp_path, 64) == first
    assert runner.num_steps == steps
    for changed in (
        replace(KEY, dtype="float32"),
        replace(KEY, num_threads=2),
        replace(KEY, device="cpu Other"),
        replace(KEY, torch_version="3"),
        replace(KEY, kernels="native"),
        replace(KEY, version=KEY.version - 1),
    ):
        load_or_measure(runner, changed, tmp_path, 64)
        assert runner.num_steps > steps
        steps = runner.num_steps


@pytest.mark.parametrize("content", ["", "{", "[]", '{"profile": {"fixed_us": "x"}}', '{"profile": {}, "key": {}}'])
def test_a_damaged_profile_is_measured_again(tmp_path: Path, content: str) -> None:
    runner: Any = ClockedRunner(TRUE)
    load_or_measure(runner, KEY, tmp_path, 64)
    path = KEY.path(tmp_path)
    path.write_text(content)
    load_or_measure(runner, KEY, tmp_path, 64)
    assert json.loads(path.read_text())["key"]["dtype"] == "bfloat16"


def test_a_cache_that_cannot_be_written_only_costs_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file where a directory should be")
    runner: Any = ClockedRunner(TRUE)
    assert load_or_measure(runner, KEY, tmp_path, 64).fixed_us == pytest.approx(TRUE.fixed_us, rel=1e-3)


@pytest.mark.parametrize(("num_blocks", "context"), [(1, 8192), (3, 40), (70, 2048)])
def test_a_small_pool_or_context_is_never_exceeded(num_blocks: int, context: int) -> None:
    runner: Any = ClockedRunner(TRUE, num_blocks, context)
    shapes = step_shapes(runner, 64)
    assert shapes
    assert min(measure_all(runner, shapes)) > 0
    for shape in shapes:
        assert all(row.start + len(row.token_ids) <= context for row in plan_of(shape, 16).rows)


def test_the_shipped_profile_is_plausible() -> None:
    profile = read_profile()
    assert profile.decode_work_us(256) > profile.fixed_us > 1000
    assert profile.prefill_work_us(0, 256) < 256 * profile.decode_work_us(1)
