"""Traces in, reports out: the same bytes for the same inputs, and figures that can be checked by hand."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.device.profiling import read_profile
from engine.sim.simulate import isolated_us, simulate
from engine.sim.workload import TraceError, TraceRequest, parse_trace, read_trace
from policies.cost import StepProfile
from policies.tiers import DEFAULT_TIERS

PROFILE = StepProfile(
    fixed_us=1000.0, prefill_token_us=10.0, prefill_attention_us=0.01, decode_row_us=100.0, decode_context_us=0.5
)
CONFIG = EngineConfig(kind="sim", max_batch_size=4, max_batch_tokens=64, prefill_chunk_tokens=32)

requests = st.builds(
    TraceRequest,
    at_us=st.integers(0, 200_000),
    team=st.sampled_from(["red", "green", "blue"]),
    prompt_tokens=st.integers(1, 200),
    output_tokens=st.integers(1, 40),
)


def flood(num_chats: int = 20) -> list[TraceRequest]:
    """A batch team that fills every slot at the start, and a chat team that asks now and then."""
    batch = [TraceRequest(0, "batch", 50, 300) for _ in range(24)]
    chats = [TraceRequest(20_000 * (1 + i), "chat", 20, 5) for i in range(num_chats)]
    return sorted(batch + chats, key=lambda request: request.at_us)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(trace=st.lists(requests, min_size=1, max_size=20).map(lambda t: sorted(t, key=lambda r: r.at_us)))
def test_any_trace_ends_and_its_figures_add_up(trace: list[TraceRequest]) -> None:
    report = simulate(trace, ["eg-mlfq", "fcfs"], profile=PROFILE, config=CONFIG, num_device_blocks=40)
    for policy in report["policies"]:
        total = policy["total"]
        assert total["num_requests"] == len(trace) and total["num_refused"] == 0
        assert policy["output_tokens"] == sum(request.output_tokens for request in trace)
        assert total["slowdown"]["p50"] >= 1 or len(trace) > 1
        assert sum(team["device_seconds"] for team in policy["teams"]) == pytest.approx(total["device_seconds"])
        assert sum(team["share"] for team in policy["teams"]) == pytest.approx(1.0, abs=1e-5)
        # What copies cost a team that has left meanwhile is served to it, and nobody is entitled to it.
        assert 0 < sum(team["entitled_share"] for team in policy["teams"]) <= 1 + 1e-5
        assert total["device_seconds"] <= policy["seconds"] + 1e-6


@pytest.mark.case("I11")
def test_the_same_inputs_give_the_same_bytes() -> None:
    first, second = (simulate(flood(), ["eg-mlfq", "fcfs"], profile=PROFILE, config=CONFIG) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    runs = first["policies"]
    assert [run["policy"] for run in runs] == ["eg-mlfq", "fcfs"]
    assert runs[0]["schedule_hash"] != runs[1]["schedule_hash"]


def test_one_more_request_gives_another_schedule_hash() -> None:
    hashes = {
        simulate(flood(n), ["fcfs"], profile=PROFILE, config=CONFIG)["policies"][0]["schedule_hash"]
        for n in (19, 20, 21)
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (1, 9), (31, 1), (32, 2), (33, 2), (200, 7), (500, 1)])
@pytest.mark.parametrize("budget", [16, 64])
def test_alone_on_the_engine_the_slowdown_is_one(prompt: int, output: int, budget: int) -> None:
    config = EngineConfig(kind="sim", max_batch_tokens=budget, prefill_chunk_tokens=32)
    trace = [TraceRequest(5, "red", prompt, output)]
    (report,) = simulate(trace, ["eg-mlfq"], profile=PROFILE, config=config)["policies"]
    assert report["total"]["slowdown"]["mean"] == 1.0
    assert report["total"]["jct_seconds"]["max"] == isolated_us(PROFILE, config, prompt, output) / 1e6


def test_isolated_time_by_hand() -> None:
    config = EngineConfig(prefill_chunk_tokens=4, max_batch_tokens=100)
    profile = StepProfile(100.0, 10.0, 1.0, 20.0, 3.0)
    chunks = (100 + 40 + (0 + 10)) + (100 + 20 + (2 * 4 + 3))
    assert isolated_us(profile, config, 6, 3) == chunks + (100 + 20 + 3 * 7) + (100 + 20 + 3 * 8)


def test_the_control_fails_where_the_fair_policy_holds() -> None:
    """A chat team beside a flood: under FCFS it waits behind it, under EG-MLFQ it hardly does, at the same speed."""
    report = simulate(flood(), ["eg-mlfq", "fcfs"], profile=PROFILE, config=CONFIG, team_tiers={"chat": "gold"})
    fair, fcfs = (
        {team["team"]: team for team in policy["teams"]}["chat"]["slowdown"]["mean"] for policy in report["policies"]
    )
    assert fair < 3 and fcfs > 20
    speeds = [policy["output_tokens_per_second"] for policy in report["policies"]]
    assert speeds[0] > 0.95 * speeds[1]


@pytest.mark.parametrize("mode", ["proactive", "reactive", "recompute", "none"])
def test_short_of_kv_memory_the_report_says_what_it_cost(mode: str) -> None:
    config = msgspec.structs.replace(CONFIG, memory_preemption=mode, prefill_chunk_tokens=16)
    sizes = {"num_device_blocks": 30, "num_host_blocks": 60, "block_copy_us": 50.0}
    report = simulate(flood(), ["eg-mlfq"], profile=PROFILE, config=config, **sizes)  # type: ignore[arg-type]
    (policy,) = report["policies"]
    total = policy["total"]
    assert report["memory"]["preemption"] == mode and report["memory"]["num_device_blocks"] == 30
    is_swapping = mode in ("proactive", "reactive")
    assert (total["num_swaps"] > 0) == (policy["bytes_out"] > 0) == (policy["stall_seconds"] > 0) == is_swapping
    assert policy["bytes_in"] <= policy["bytes_out"] + total["num_swaps"] * 30 * report["memory"]["block_bytes"]
    assert (total["num_recomputes"] > 0) == (policy["replayed_tokens"] > 0)
    assert total["num_recomputes"] > 0 or mode != "recompute"
    assert total["overhead_device_seconds"] >= policy["stall_seconds"]
    copied = (policy["bytes_out"] + policy["bytes_in"]) / report["memory"]["block_bytes"] * 50 / 1e6
    assert policy["stall_seconds"] == pytest.approx(copied, abs=1e-5)
    assert policy["output_tokens"] == sum(request.output_tokens for request in flood()) and total["num_refused"] == 0


def test_tiers_reach_the_report_and_unknown_ones_are_refused() -> None:
    report = simulate(flood(), ["fcfs"], profile=PROFILE, config=CONFIG, team_tiers={"chat": "gold"})
    teams = {team["team"]: (team["tier"], team["weight"]) for team in report["policies"][0]["teams"]}
    assert teams == {"batch": ("silver", 2), "chat": ("gold", 4)}
    with pytest.raises(ValueError, match="team 'chat' has tier 'platinum'; there are: gold, silver, bronze"):
        simulate(flood(), ["fcfs"], profile=PROFILE, team_tiers={"chat": "platinum"}, tiers=DEFAULT_TIERS)
    with pytest.raises(ValueError, match="the trace has no team 'caht'; there are: batch, chat"):
        simulate(flood(), ["fcfs"], profile=PROFILE, team_tiers={"caht": "gold"})
    with pytest.raises(ValueError, match="unknown policy 'lottery'"):
        simulate(flood(), ["lottery"], profile=PROFILE)


def test_requests_that_cannot_run_are_counted_as_refused() -> None:
    trace = [TraceRequest(0, "red", 5000, 1), TraceRequest(0, "red", 5, 1)]
    report = simulate(trace, ["fcfs"], profile=PROFILE, config=CONFIG, context_len=1000)
    assert report["policies"][0]["total"]["num_refused"] == 1
    assert report["policies"][0]["output_tokens"] == 1
    assert report["policies"][0]["refused"] == {
        "the prompt and one token of output are more than the model's context (1000 tokens)": 1
    }


def test_requests_that_outgrow_the_memory_are_counted_as_cut() -> None:
    trace = [TraceRequest(0, "red", 30, 100), TraceRequest(0, "red", 10, 5), TraceRequest(0, "red", 64, 1)]
    report = simulate(trace, ["fcfs"], profile=PROFILE, config=CONFIG, num_device_blocks=4, num_host_blocks=0)
    (policy,) = report["policies"]
    assert (policy["total"]["num_cut"], policy["total"]["num_refused"]) == (1, 1)
    assert policy["output_tokens"] == 34 + 5, "what was put out, not what was asked for"
    assert policy["cut"] == {"prompt and output are more than the KV memory (64 tokens)": 1}
    assert policy["refused"] == {"the prompt and one token of output are more than the KV memory (64 tokens)": 1}


def test_memory_in_which_nothing_can_run_is_an_error() -> None:
    nothing = msgspec.structs.replace(CONFIG, kv_memory_bytes=1000)
    with pytest.raises(ValueError, match="--kv-memory of 1000 bytes holds no block of 368640 bytes; raise it"):
        simulate(flood(), ["fcfs"], profile=PROFILE, config=nothing)
    least = r"holds 16 tokens and not even one request .* has 21; give at least 737280 bytes"
    with pytest.raises(ValueError, match=least):
        simulate(flood(), ["fcfs"], profile=PROFILE, config=CONFIG, num_device_blocks=1)


def test_promotions_and_the_longest_pause_are_in_the_report() -> None:
    report = simulate(flood(), ["eg-mlfq", "fcfs"], profile=PROFILE, config=CONFIG)
    fair, fcfs = (policy["total"] for policy in report["policies"])
    assert fcfs["num_promotions"] == 0 and fair["longest_pause_seconds"] > 0
    chats = [{team["team"]: team for team in policy["teams"]}["chat"] for policy in report["policies"]]
    assert chats[0]["longest_pause_seconds"] < chats[1]["longest_pause_seconds"]


def test_a_trace_whose_last_requests_cannot_run_still_ends() -> None:
    trace = [TraceRequest(0, "red", 5, 1), TraceRequest(900_000, "red", 5000, 1)]
    for requests_of in (trace, trace[1:]):
        report = simulate(requests_of, ["eg-mlfq", "fcfs"], profile=PROFILE, config=CONFIG, context_len=1000)
        for policy in report["policies"]:
            assert (policy["total"]["num_requests"], policy["total"]["num_refused"]) == (len(requests_of), 1)


def test_a_trace_is_read_sorted_by_time_with_ties_in_file_order() -> None:
    lines = [
        '{"t": 1.5, "team": "b", "prompt_tokens": 2, "output_tokens": 3}',
        "",
        '{"t": 0, "team": "a", "prompt_tokens": 1, "output_tokens": 1, "note": "kept out"}',
        '{"t": 1.5, "team": "c", "prompt_tokens": 4, "output_tokens": 5}',
    ]
    assert parse_trace(lines) == [
        TraceRequest(0, "a", 1, 1),
        TraceRequest(1_500_000, "b", 2, 3),
        TraceRequest(1_500_000, "c", 4, 5),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "malformed"),
        ('{"t": 1, "team": "a", "prompt_tokens": 1}', "output_tokens"),
        ('{"t": -1, "team": "a", "prompt_tokens": 1, "output_tokens": 1}', r"\$.t"),
        ('{"t": 1e300, "team": "a", "prompt_tokens": 1, "output_tokens": 1}', "too large"),
        ('{"t": 1, "team": "", "prompt_tokens": 1, "output_tokens": 1}', "team"),
        ('{"t": 1, "team": "a", "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens"),
        ('{"t": 1, "team": "a", "prompt_tokens": 1.5, "output_tokens": 1}', "prompt_tokens"),
        ('{"t": 1, "team": "a", "prompt_tokens": 1, "output_tokens": true}', "output_tokens"),
        ('["t"]', "object"),
    ],
)
def test_a_bad_line_is_named(line: str, words: str) -> None:
    good = '{"t": 0, "team": "a", "prompt_tokens": 1, "output_tokens": 1}'
    with pytest.raises(TraceError, match=f"trace.jsonl, line 3: .*{words}"):
        parse_trace([good, "", line], "trace.jsonl")


def test_a_missing_file_and_an_empty_trace_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(empty)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 1"):
        read_trace(binary)


def test_the_shipped_profile_is_whole_and_positive() -> None:
    profile = read_profile()
    assert min(profile.fixed_us, profile.prefill_token_us, profile.decode_row_us) > 0
    assert profile.prefill_work_us(0, 256) > profile.decode_work_us(256)
