"""From settings to an engine: what cannot be right is refused, and constants follow from the profile."""

import json
from typing import Any

import pytest

from engine.config import EngineConfig, StartError
from engine.process.assembly import least_rate_percent, policy_config, read_config
from policies.cost import StepProfile


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "gpu"}, "engine kind 'gpu' is unknown"),
        ({"memory_preemption": "swap"}, "memory_preemption 'swap' is unknown"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"levels": 0}, "levels must be at least 1, got 0"),
        ({"host_kv_memory_bytes": -1}, "host_kv_memory_bytes must be at least 0, got -1"),
        ({"swap_link_percent": 0}, "swap_link_percent must be from 1 to 100, got 0"),
        ({"swap_link_percent": 101}, "swap_link_percent must be from 1 to 100, got 101"),
        ({"isolation": "none"}, "isolation 'none' is unknown; use batch or strict"),
        ({"step_time_max_us": -1}, "step_time_max_us must be from 0 to 60000000, got -1"),
        ({"step_time_max_us": 60_000_001}, "step_time_max_us must be from 0 to 60000000, got 60000001"),
        ({"prefill_chunk_us": -1}, "prefill_chunk_us must be from 0 to 60000000, got -1"),
        ({"promotion_percent": 100}, "promotion_percent must be from 0 to 99, got 100"),
        ({"num_threads": -1}, "num_threads must not be negative, got -1"),
        ({"levels": "many"}, "--config is not a valid engine configuration"),
    ],
)
def test_a_setting_out_of_range_stops_the_start(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError, match=words.replace("(", r"\(")):
        read_config(json.dumps(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"swap_link_percent": 1},
        {"step_time_max_us": 1},
        {"prefill_chunk_us": 60_000_000},
        {"isolation": "strict"},
        {"swap_link_percent": 100},
        {"promotion_percent": 99},
        {"host_kv_memory_bytes": 0},
    ],
)
def test_a_setting_at_its_edge_is_taken(changes: dict[str, Any]) -> None:
    config = read_config(json.dumps({"num_threads": 3, **changes}))
    assert config == EngineConfig(num_threads=3, **changes)


def test_when_no_threads_are_given_one_core_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (8, 7)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert read_config("{}").num_threads == expected


@pytest.mark.parametrize(("link", "left"), [(60, 40), (1, 99), (99, 1), (100, 1)])
def test_swapping_leaves_the_rest_of_the_device(link: int, left: int) -> None:
    assert least_rate_percent(EngineConfig(swap_link_percent=link)) == left


def test_the_constants_are_those_of_settings_and_profile() -> None:
    profile = StepProfile(
        fixed_us=100.0, prefill_token_us=10.0, prefill_attention_us=0.0, decode_row_us=20.0, decode_context_us=0.0
    )
    config = EngineConfig(
        levels=3,
        fairness_window_ms=250,
        prefill_chunk_tokens=64,
        max_batch_tokens=32,
        promotion_percent=11,
        coast=False,
    )
    found = policy_config(config, profile, 1000)
    assert (found.levels, found.fairness_window_us, found.promotion_percent) == (3, 250_000, 11)
    assert not found.coast
    assert found.step_cost_max_us == 100 + 32 * 10, "a chunk is never more than a step's tokens"
    assert found.theta_cost_us == 2 * (100 + 20) and found.base_quantum_us == 100 + 10 * 128
