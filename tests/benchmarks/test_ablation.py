"""The ablation benchmark on a tiny model: its counts agree with each other, and swapping changes no id there either."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.ablation import UNCONSTRAINED, Play, break_even_bandwidth, play, print_runs, show
from engine.config import EngineConfig
from engine.models.store import TINY
from engine.sim.workload import parse_trace
from policies.cost import StepProfile

LINES = [
    f'{{"t": {0.001 * i}, "team": "{["reports", "support", "dev"][i % 3]}", "prompt_tokens": {9 + 5 * i}, '
    f'"output_tokens": {70 - 5 * i}}}'
    for i in range(12)
]


@pytest.mark.case("I12")
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_a_constrained_run_has_the_unconstrained_runs_ids(
    tmp_path_factory: pytest.TempPathFactory, sampling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_dir: Path = tmp_path_factory.getbasetemp() / "ablation"
    trace = parse_trace(LINES)
    config = EngineConfig(
        model=TINY, dtype="bfloat16", num_threads=1, max_batch_size=4, cache_dir=str(cache_dir), swap_benefit=0
    )
    block_bytes = 3 * 2 * 16 * 2 * 16 * 2
    free_config = msgspec.structs.replace(config, kv_memory_bytes=60 * block_bytes, memory_preemption="none")
    free = play(UNCONSTRAINED, free_config, trace, 1, sampling)
    few = msgspec.structs.replace(config, kv_memory_bytes=11 * block_bytes)
    runs = [free, play("proactive", few, trace, 1, sampling)]
    few_recomputed = msgspec.structs.replace(few, memory_preemption="recompute")
    runs.append(play("recompute", few_recomputed, trace, 1, sampling))
    for run in runs:
        show(run, free)
        assert (run["failed"], run["errors"], run["block_bytes"]) == (0, [], block_bytes)
        assert run["output_tokens"] == sum(row.output_tokens for row in trace)
        assert run["peak_blocks"] <= run["device_blocks"]
        assert sum(row["requests"] for row in run["teams"]) == len(trace)
        assert sum(row["swaps"] for row in run["teams"]) == run["swaps_out"]
        assert all(row["ttft_p99"] <= row["jct_p99"] for row in run["teams"])
    _, swapped, recomputed = runs
    assert swapped["differing_ids"] == 0
    assert swapped["swaps_out"] >= swapped["swaps_in"] > 0 and swapped["recomputes"] == 0
    assert 0 < swapped["bytes_out"] <= swapped["bytes_in"]  # what is clean is not copied out again
    assert swapped["bytes_in"] % block_bytes == 0
    assert 0 < swapped["stall_share"] < 1
    assert recomputed["recomputes"] > 0 and recomputed["bytes_out"] == recomputed["bytes_in"] == 0
    assert swapped["link"]["measured_gb_per_second"] > 0 and swapped["link"]["break_even_gb_per_second"] > 0
    print_runs(runs, "tiny")
    printed = capsys.readouterr().out
    assert all(run["run"] in printed for run in runs) and "swapping beats recomputing above" in printed


@pytest.mark.case("O13")
def test_at_the_break_even_out_and_back_takes_a_recomputation() -> None:
    """Llama 8B on an A100: 131,072 bytes a token, 2 * 8.03e9 operations a token at 45 % of 312e12 a second."""
    token_us = 2 * 8.03e9 / 140.4e12 * 1e6
    assert break_even_bandwidth(131_072, StepProfile(9.0, token_us, 0.0, 1.0, 1.0)) == pytest.approx(2.29e9, rel=0.001)
    assert break_even_bandwidth(131_072, StepProfile(9.0, 0.0, 0.0, 1.0, 1.0)) == 0.0


def test_a_request_that_gets_other_ids_is_told() -> None:
    base = {"output_tokens_per_second": 2.0, "output_tokens_per_cpu_second": 4.0, "policy": "p", "run": "r"}
    free = {**base, "ids": ["a", "b", "c"], "wall_seconds": 1.0, "swaps_out": 0, "recomputes": 0}
    other = {**free, "ids": ["a", "x", "c"], "output_tokens_per_second": 1.0, "output_tokens_per_cpu_second": 3.0}
    show(other, free)
    assert (other["differing_ids"], other["throughput_ratio"], other["cpu_throughput_ratio"]) == (1, 0.5, 0.75)


def test_prompts_depend_on_the_seed_and_the_place_in_the_trace_only() -> None:
    trace = parse_trace(LINES)

    def prompts(seed: int, rows: int) -> list[tuple[int, ...]]:
        one = Play(None, trace[:rows], seed, "seeded", 512)  # type: ignore[arg-type]
        return [one._submit(i, 1).prompt_token_ids for i in range(rows)]

    assert prompts(1, 12)[:5] == prompts(1, 5) != prompts(2, 5)
    assert [len(prompt) for prompt in prompts(1, 12)] == [row.prompt_tokens for row in trace]
