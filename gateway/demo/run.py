"""`terazi demo`: one bundled trace of three teams, played under FCFS and under EG-MLFQ against a real server.

It prints the model's SHA-256, one real answer, a table of each team under both policies, and what each run swapped,
preempted and promoted. It writes one self-contained page: the fairness report of the EG-MLFQ run, with the comparison
above it. If a request fails, the exit code is 1.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine.sim.workload import TraceError, TraceRequest, parse_trace, read_trace
from gateway.command import EXIT_USAGE, CommandError, print_json, print_table
from gateway.demo.policy_run import RunOptions, run_policy
from gateway.demo.replay import Outcome
from gateway.outputs import make_directory, write_output
from tenants.names import is_name

POLICIES = ("fcfs", "eg-mlfq")
# Less than the requests of the bundled trace need, so that the demo shows swapping.
KV_MEMORY = "160MiB"
SPEED_PERCENT = 10  # if the machine's speed differed by more between two runs, warn
QUESTION = "What is the capital of France? Answer in one sentence."
BUNDLED = "the bundled trace, sampled from the Azure LLM inference trace 2023 (CC-BY-4.0)"


def load_trace(path: Path | None, seconds: float) -> list[TraceRequest]:
    """The requests in the first `seconds` of a trace, by default of the bundled trace (see its NOTICE.txt).

    Raises TraceError when the trace cannot be read, has no request in that time, or has a team name that no server
    takes.
    """
    if path is None:
        text = (files("gateway.demo") / "trace.jsonl").read_text("utf-8")
        rows = parse_trace(text.splitlines(), "the bundled trace")
    else:
        rows = read_trace(path)
    kept = [row for row in rows if row.at_us <= seconds * 1e6]
    if not kept:
        raise TraceError(f"no request comes within {seconds:g} s")
    for team in dict.fromkeys(row.team for row in kept):
        if not is_name(team):
            raise TraceError(
                f"{path}: a server has no team {team[:80]!r}; rename it with 1 to 63 of a-z, 0-9, '.', '_' and '-', "
                "beginning with a letter or digit (terazi simulate takes any name)"
            )
    return kept


def run_demo(
    *,
    out: Path,
    seconds: float,
    trace: Path | None,
    engine: str,
    model: str,
    max_batch_size: str,
    kv_memory: str,
    host_kv_memory: str,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """The whole demo. `seconds` is how much of the trace is played. Raises CommandError, also when a request failed."""
    from engine.models.store import ModelStoreError, prepare

    try:
        rows = load_trace(trace, seconds)
        make_directory(out)  # now, so that a wrong directory fails before the runs, which take minutes
        stored = prepare(model)
    except TraceError as error:
        raise CommandError(str(error), EXIT_USAGE, "trace_unusable") from None
    except ModelStoreError as error:
        raise CommandError(str(error), code="model_unusable") from None
    say: Callable[[str], None] = (lambda _: None) if as_json else print
    say(f"model {stored.name}\nSHA-256 {stored.sha256}")
    if engine == "sim":
        say("SIMULATED: no model computes these answers, and device time is modelled")
    options = RunOptions(
        data_root=(data_dir or out / "data").absolute(),
        engine=engine,
        model=model,
        max_batch_size=max_batch_size,
        vocab_size=stored.config.vocab_size,
        question=QUESTION,
        kv_memory=kv_memory,
        host_kv_memory=host_kv_memory,
    )
    source = str(trace) if trace else BUNDLED
    say(f"trace: {len(rows)} requests over {rows[-1].at_us / 1e6:.0f} s, {source}")
    runs = []
    for policy in POLICIES:
        with _Progress(f"{policy:8}", len(rows), is_shown=not as_json) as progress:
            runs.append(run_policy(policy, rows, options, progress.advance))
        if policy == POLICIES[0]:
            say(f"\n{QUESTION}\n> {runs[0]['answer']}\n")
    report = {
        "lead": f"The same {len(rows)} requests of three teams, played twice over HTTP against a real server.",
        "facts": {
            "model": stored.name,
            "SHA-256": stored.sha256,
            "trace": source,
            "slots": max_batch_size,
            "KV memory": f"{kv_memory} on the device, {host_kv_memory} on the host",
            "engine": "sim (simulated)" if engine == "sim" else engine,
            "processor cores": str(os.cpu_count()),
            "output tokens/s": ", ".join(f"{r['policy']} {r['output_tokens_per_second']:.1f}" for r in runs),
        },
        "warnings": [] if engine == "sim" else speed_warnings(runs),  # the simulated engine's time is modelled
        "question": QUESTION,
        "answer": runs[0]["answer"],
        "runs": runs,
    }
    path = write_report(report, out)
    _print(report, path, as_json)
    failed = sum(run["failed"] for run in runs)
    if failed:
        reasons = "; ".join(dict.fromkeys(error for run in runs for error in run["errors"]))
        raise CommandError(f"{failed} requests failed: {reasons}", code="requests_failed")


def speed_warnings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning if the machine was not equally fast in all runs, whose seconds then cannot be compared."""
    speeds = {run["policy"]: run["device_ms_per_output_token"] for run in runs if run["device_ms_per_output_token"]}
    least, most = min(speeds.values(), default=1.0), max(speeds.values(), default=1.0)
    if most <= least * (1 + SPEED_PERCENT / 100):
        return []
    each = ", ".join(f"{policy} {speed:.2f} ms" for policy, speed in speeds.items())
    return [
        f"The machine's speed differed by {(most / least - 1) * 100:.0f} % between the runs (device time per output "
        f"token: {each}), so this comparison is not fair. Close what else runs here and try again."
    ]


def write_report(report: dict[str, Any], out: Path) -> Path:
    """Write report.html and report.json into `out`. Returns the path of report.html. Raises CommandError."""
    from gateway.reports.comparison import render_demo

    path = out / "report.html"
    make_directory(out)
    write_output(path, render_demo(report))
    write_output(out / "report.json", json.dumps(report, indent=1) + "\n")
    return path


def _print(report: dict[str, Any], path: Path, as_json: bool) -> None:
    from gateway.reports.comparison import run_rows, table_rows

    if as_json:
        runs = [{k: v for k, v in run.items() if k not in ("series", "samples")} for run in report["runs"]]
        print_json({**report, "runs": runs, "page": str(path)})
        return
    print_table(table_rows(report), title="per team; TTFT, JCT: seconds")
    rows = run_rows(report)
    print_table(rows, title="each run")
    first, second = (row["output_tokens_per_second"] for row in rows)
    ratio = second / (first or 1.0)
    for warning in report["warnings"]:
        print(f"WARNING: {warning}")
    print(f"output tokens/s, {rows[1]['policy']} over {rows[0]['policy']}: {ratio:.3f}\nreport: {path}")


class _Progress:
    """A progress bar on stderr. It shows nothing with --json."""

    def __init__(self, label: str, total: int, *, is_shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._failed = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not is_shown,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(label, total=total, note="starting the server")

    def __enter__(self) -> "_Progress":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def advance(self, outcome: Outcome) -> None:
        """Note that a request has ended."""
        self._failed += outcome.error is not None
        note = f"{self._failed} failed" if self._failed else ""
        self._progress.update(self._task, advance=1, note=note)
