"""TorchRunner: one row's fault is its own, blocks do not leak between owners, and build() starts or says why not."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.model_store import TINY
from engine.plan import Row, StepPlan
from engine.service_torch import EngineStartError, build, choose_dtype, cpu_has_bfloat16
from engine.tiny import write_tiny_model
from tests.engine.torch_schedules import Job, Progress, RecordingRunner, make_runner, row_of, run_alone

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "native"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecordingRunner:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path)
    return make_runner(path, torch.float32, native=request.param)


def prompt_row(seq_id: int, prompt: Sequence[int], first_block: int) -> Row:
    progress = Progress(Job(tuple(prompt), 1, GREEDY), blocks=list(range(first_block, first_block + 4)))
    return row_of(progress, seq_id, len(prompt))


@pytest.mark.case("K68")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token_ids": [5, 512]}, "outside the vocabulary"),
        ({"token_ids": [5, -1]}, "outside the vocabulary"),
        ({"token_ids": []}, "0 tokens"),
        ({"start": 2047, "token_ids": [5, 5]}, "outside the context"),
        ({"block_table": []}, "do not hold"),
        ({"block_table": [64]}, "outside the pool"),
        ({"is_decode": True}, "3 tokens"),
    ],
)
def test_a_row_that_cannot_run_fails_alone(runner: RecordingRunner, change: dict[str, Any], expected: str) -> None:
    good = prompt_row(1, range(10, 40), 0)
    bad = msgspec.structs.replace(prompt_row(2, [5, 6, 7], 8), **change)
    alone = runner.execute(StepPlan(1, (good,)))
    result = runner.execute(StepPlan(2, (bad, good)))
    assert result.token_ids == alone.token_ids
    assert expected in result.failed[2]
    assert result.duration_us > 0


@pytest.mark.case("K35")
def test_an_allocation_failure_fails_only_the_row_that_causes_it(
    runner: RecordingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [prompt_row(i, range(10 + i, 40 + i), 4 * i) for i in range(4)]
    expected = runner.execute(StepPlan(1, tuple(rows))).token_ids
    forward = runner.model.forward

    def failing(batch: Any, *args: Any) -> torch.Tensor:
        if 12 in batch.token_ids[:1] or len(batch.prefill) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore lines")
        return forward(batch, *args)

    monkeypatch.setattr(runner.model, "forward", failing)
    result = runner.execute(StepPlan(2, tuple(rows)))
    assert result.failed == {2: "DefaultCPUAllocator: can't allocate memory"}
    assert result.token_ids == {i: token for i, token in expected.items() if i != 2}


def test_a_step_without_rows_is_empty(runner: RecordingRunner) -> None:
    result = runner.execute(StepPlan(7, ()))
    assert (result.step_id, result.token_ids, result.failed) == (7, {}, {})


def test_a_chunk_that_does_not_end_the_prompt_yields_no_token(runner: RecordingRunner) -> None:
    progress = Progress(Job(tuple(range(10, 50)), 1, GREEDY), blocks=[0, 1, 2])
    assert runner.execute(StepPlan(1, (row_of(progress, 1, 20),))).token_ids == {}


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_a_reused_block_shows_nothing_of_its_former_owner(runner: RecordingRunner, poison: float) -> None:
    """A canary: every block is filled with what would spoil any sum, then handed to new owners."""
    job = Job(tuple(range(20, 61)), 8, GREEDY)
    baseline = run_alone(runner, job)
    runner.cache.pool[: runner.cache.num_blocks] = poison
    again = run_alone(runner, job)
    assert (again.output, again.logits) == (baseline.output, baseline.logits)
    runner.cache.pool.zero_()


def test_only_the_owners_blocks_are_written(runner: RecordingRunner) -> None:
    runner.cache.pool.fill_(7)
    runner.cache.pool[runner.cache.null_block] = 0
    progress = Progress(Job(tuple(range(20, 61)), 1, GREEDY), blocks=[5, 9, 2])
    runner.execute(StepPlan(1, (row_of(progress, 1, 100),)))
    untouched = [block for block in range(runner.cache.num_blocks) if block not in progress.blocks]
    assert bool((runner.cache.pool[untouched] == 7).all())
    assert not runner.cache.pool[runner.cache.null_block].any()
    runner.cache.pool.zero_()


@pytest.mark.case("K54")
def test_ids_the_tokenizer_lacks_are_never_sampled(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, vocab_size=640)
    runner = make_runner(tmp_path, torch.float32)
    runner.num_tokens = 512
    job = Job((5, 6, 7), 60, SamplingParams(temperature=3.0, seed=1))
    assert max(run_alone(runner, job).output) < 512


def config_of(cache: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=TINY,
        cache_dir=str(cache),
        num_threads=1,
        **{"kv_memory_bytes": 4 * 2**20, "max_batch_tokens": 256, "max_batch_size": 8, **changes},
    )


def test_build_gives_what_the_service_needs(tmp_path: Path) -> None:
    parts = build(config_of(tmp_path, dtype="float32"))
    # 3 layers x 2 x 16 tokens x 2 heads x 16 dims x 4 bytes
    assert parts.num_device_blocks == 4 * 2**20 // 12288
    assert (parts.model_info.name, parts.model_info.dtype, parts.model_info.device) == (TINY, "float32", "cpu")
    row = prompt_row(1, range(10, 40), 0)
    assert 0 <= parts.runner.execute(StepPlan(1, (row,))).token_ids[1] < 512
    # The second start reads the profile of the first.
    kept = next((tmp_path / "profiles").iterdir())
    document = json.loads(kept.read_text())
    document["profile"]["fixed_us"] = 123.0
    kept.write_text(json.dumps(document))
    assert build(config_of(tmp_path, dtype="float32")).profile.fixed_us == 123.0


@pytest.mark.case("K77")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_memory_bytes": 1000}, "does not hold one KV block of 12288 bytes"),
        ({"kv_memory_bytes": 2**60}, "MiB are available"),
        ({"dtype": "int8"}, "float32 or bfloat16"),
        ({"device": "tpu"}, "auto, cpu or cuda"),
        ({"model": "/nowhere"}, "neither a built-in name"),
    ],
)
def test_settings_that_cannot_work_stop_the_start(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    base = msgspec.structs.asdict(config_of(tmp_path, dtype="float32"))
    with pytest.raises(EngineStartError, match=expected) as error:
        build(EngineConfig(**{**base, **changes}))
    assert "\n" not in str(error.value)


def test_auto_takes_bfloat16_only_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for amx, avx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert cpu_has_bfloat16() == (amx or avx)
        assert choose_dtype("auto", cpu) == (torch.bfloat16 if amx or avx else torch.float32)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("bfloat16", cpu) == torch.bfloat16
