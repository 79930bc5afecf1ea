"""build() starts a real engine, or says why not."""

import json
import logging
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig, StartError
from engine.device.kv_cache import KVCache, host_blocks_that_fit
from engine.device.parts import build, choose_dtype, cpu_has_bfloat16
from engine.models.config import read_model_config
from engine.models.store import TINY
from engine.models.tiny import write_tiny_model
from engine.plan import StepPlan
from tests.engine.device.test_runner import prompt_row


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the starts that ask nothing of it: the model and its profile are made once."""
    return tmp_path_factory.mktemp("cache")


def config_of(cache: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=TINY,
        cache_dir=str(cache),
        num_threads=1,
        **{
            "kv_memory_bytes": 4 * 2**20,
            "host_kv_memory_bytes": 6 * 2**20,
            "max_batch_tokens": 256,
            "max_batch_size": 8,
            **changes,
        },
    )


def test_build_gives_what_the_service_needs(tmp_path: Path) -> None:
    parts = build(config_of(tmp_path, dtype="float32"))
    # 3 layers x 2 x 16 tokens x 2 heads x 16 dims x 4 bytes
    assert (parts.block_bytes, parts.num_device_blocks) == (12288, 4 * 2**20 // 12288)
    assert parts.num_host_blocks == parts.runner.cache.num_host_blocks == 6 * 2**20 // 12288
    assert parts.block_copy_us > 0
    assert parts.runner.canary is None
    assert (parts.model_info.name, parts.model_info.dtype, parts.model_info.device) == (TINY, "float32", "cpu")
    row = prompt_row(1, range(10, 40), 0)
    assert 0 <= parts.runner.execute(StepPlan(1, (row,))).token_ids[1] < 512
    # The second start reads the profile of the first.
    kept = next((tmp_path / "profiles").iterdir())
    document = json.loads(kept.read_text())
    document["profile"]["fixed_us"] = 123.0
    kept.write_text(json.dumps(document))
    assert build(config_of(tmp_path, dtype="float32")).profile.fixed_us == 123.0


@pytest.mark.parametrize(
    ("changes", "num_host_blocks"),
    [
        ({"memory_preemption": "reactive"}, 512),
        ({"memory_preemption": "recompute"}, 0),
        ({"memory_preemption": "none"}, 0),
        ({"host_kv_memory_bytes": 0}, 0),
        ({"host_kv_memory_bytes": 12287}, 0),
        ({"kv_canary": True}, 512),
    ],
)
def test_a_host_pool_is_there_when_the_mode_swaps(
    cache_dir: Path, changes: dict[str, Any], num_host_blocks: int
) -> None:
    parts = build(config_of(cache_dir, dtype="float32", **changes))
    assert parts.num_host_blocks == num_host_blocks
    assert (parts.runner.cache.host_pool is None, parts.block_copy_us == 0) == ((num_host_blocks == 0,) * 2)
    assert (parts.runner.canary is not None) == changes.get("kv_canary", False)


@pytest.mark.case("K77")
def test_a_host_pool_larger_than_memory_is_made_smaller_and_said_so(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its default must not keep a small machine from serving. On a CPU both pools come out of the same memory."""
    monkeypatch.setattr("engine.device.kv_cache.available_bytes", lambda device: 8 * 2**20)
    with caplog.at_level(logging.WARNING):
        parts = build(config_of(cache_dir, dtype="float32"))
    assert parts.num_host_blocks == (8 * 2**20 - parts.num_device_blocks * 12288) * 3 // 4 // 12288
    (line,) = [record.getMessage() for record in caplog.records if "--host-kv-memory" in record.getMessage()]
    assert "of 6 MiB is more than the machine can spare: the host KV pool gets 3 MiB (256 blocks)" in line
    assert host_blocks_that_fit(9, 100, None) == 9
    assert host_blocks_that_fit(9, 100, -5) == 0
    monkeypatch.undo()
    caplog.clear()
    assert build(config_of(cache_dir, dtype="float32")).num_host_blocks == 512
    assert "--host-kv-memory" not in caplog.text


@pytest.mark.case("K77")
def test_a_host_pool_that_cannot_be_had_stops_the_start(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.kv_cache.host_blocks_that_fit", lambda wanted, *_: wanted)
    with pytest.raises(StartError, match=r"the host KV pool of .* lower --host-kv-memory") as error:
        build(config_of(cache_dir, dtype="float32", host_kv_memory_bytes=2**60))
    assert "\n" not in str(error.value)


def test_a_host_pool_costs_no_memory_before_its_first_block(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = read_model_config(tmp_path)
    before = resident_bytes()
    cache = KVCache(config, 8, 16, torch.float32, torch.device("cpu"), num_host_blocks=2**28 // 12288)
    assert cache.host_pool is not None
    assert resident_bytes() - before < 2**26
    cache.host_pool[:8000].zero_()
    assert resident_bytes() - before > 2**26


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
    with pytest.raises(StartError, match=expected) as error:
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
