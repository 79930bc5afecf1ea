"""The demo end to end on the simulated engine, with a trace of a second."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.demo.run import load_trace
from tests.support.e2e.server import Server


def write_trace(path: Path, teams: list[str]) -> Path:
    rows = [
        {"t": i * 0.02, "team": teams[i % len(teams)], "prompt_tokens": 20, "output_tokens": 4 + 8 * (i % 3)}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def demo(tmp_path: Path, cache_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "gateway.cli", "demo", "--engine", "sim", "--model", "tiny-random"]
    # A setting of the operator's own server must not reach the demo's.
    environment = {**Server(tmp_path / "unused", cache_dir).environment, "TERAZI_STORE_URL": "postgresql://nowhere/x"}
    return subprocess.run(
        [*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )


def test_the_demo_compares_both_policies_and_writes_a_page(tmp_path: Path, cache_dir: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", ["support", "dev", "reports"])
    done = demo(tmp_path, cache_dir, "--trace", str(trace), "--max-batch-size", "2", "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert [run["policy"] for run in report["runs"]] == ["fcfs", "eg-mlfq"]
    for run in report["runs"]:
        assert (run["failed"], run["all"]["requests"]) == (0, 12)
        assert [(row["team"], row["tier"]) for row in run["teams"]] == [
            ("support", "gold"),
            ("dev", "silver"),
            ("reports", "bronze"),
        ]
        assert all(row["jct_mean"] > row["ttft_mean"] > 0 for row in run["teams"])
        assert all(row["slowdown_mean"] > 0 and row["device_seconds"] > 0 for row in run["teams"])
        assert run["fairness"]["object"] == "fairness_report"
        assert {row["team"] for row in run["fairness"]["data"]} == {"support", "dev", "reports"}
    fcfs, ours = report["runs"]
    assert sum(row["preemptions"] for row in fcfs["teams"]) == 0
    assert sum(row["preemptions"] for row in ours["teams"]) > 0
    page = (tmp_path / "demo-out" / "report.html").read_text("utf-8")
    assert "Both orders side by side" in page and "Longest pause of a request" in page
    assert f"{ours['fairness']['jain_weighted']:.3f}" in page
    assert "CC-BY-4.0" in page


def test_a_demo_with_little_kv_memory_swaps_and_says_so_everywhere(tmp_path: Path, cache_dir: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"t": i * 0.01, "team": ("support", "reports")[i % 2], "prompt_tokens": 30, "output_tokens": (4, 90)[i % 2]}
        for i in range(24)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # 24 blocks of the tiny model on the device; the twelve long ones alone grow to 96.
    options = ["--trace", str(trace), "--max-batch-size", "2", "--kv-memory", str(24 * 6144)]
    done = demo(tmp_path, cache_dir, *options, "--host-kv-memory", "4MiB")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "demo-out" / "report.json").read_text())
    ours = report["runs"][1]
    totals = ours["fairness"]["totals"]
    assert totals["swaps_out"] > 0 and totals["bytes_out"] >= totals["swaps_out"] * 6144 // 2
    assert totals["swaps_out"] == sum(pair["swaps_out"] for pair in ours["fairness"]["interference"])
    assert totals["recomputes"] == sum(row["recomputes"] for row in ours["teams"]) == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    printed = next(line for line in lines if line[:1] == ["eg-mlfq"])
    assert printed[5:10] == [str(totals[name]) for name in
                            ("preemptions", "swaps_out", "swaps_in", "recomputes", "promotions")]  # fmt: skip
    page = (tmp_path / "demo-out" / "report.html").read_text("utf-8")
    assert f'<dd class="big ">{totals["swaps_out"]:,}</dd>' in page


def test_a_failed_request_is_a_failed_demo(tmp_path: Path, cache_dir: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"t": 0, "team": "support", "prompt_tokens": p, "output_tokens": 2} for p in (20, 900_000)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = demo(tmp_path, cache_dir, "--trace", str(trace))
    assert done.returncode == 1
    assert "2 requests failed: HTTP 4" in done.stderr
    assert "2 requests failed" in (tmp_path / "demo-out" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"t": 0}', '{"t": -1, "team": "a", "prompt_tokens": 1, "output_tokens": 1}']
)
def test_a_damaged_trace_is_one_line(tmp_path: Path, cache_dir: Path, content: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(content)
    done = demo(tmp_path, cache_dir, "--trace", str(trace))
    assert done.returncode == 2
    assert str(trace) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_bundled_trace_is_a_minute_of_three_teams() -> None:
    rows = load_trace(None, 60)
    assert {row.team for row in rows} == {"support", "dev", "reports"}
    assert 55e6 < rows[-1].at_us <= 60e6
    assert all(row.prompt_tokens + row.output_tokens < 2048 for row in rows)
    assert len(load_trace(None, 5)) < len(rows)
    notice = Path(load_trace.__code__.co_filename).with_name("NOTICE.txt")
    assert "CC-BY-4.0" in notice.read_text("utf-8")
