"""One run of the demo: the flags its server gets."""

from dataclasses import replace
from pathlib import Path

from gateway.demo.policy_run import RunOptions, serve_options


def test_a_run_is_served_with_the_flags_it_names_and_no_others() -> None:
    plain = RunOptions(Path("d"), "sim", "tiny", "16", 512)
    assert serve_options("fcfs", plain) == [
        *("--policy", "fcfs", "--engine", "sim", "--model", "tiny", "--max-batch-size", "16")
    ]
    tight = replace(plain, kv_memory="64MiB", host_kv_memory="1GiB", max_batch_tokens="256")
    flags = serve_options("eg-mlfq", tight)[8:]
    assert flags == ["--max-batch-tokens", "256", "--kv-memory", "64MiB", "--host-kv-memory", "1GiB"]
    assert (plain.tier_of("support"), plain.tier_of("someone")) == ("gold", "silver")
    assert replace(plain, team_tiers={"someone": "bronze"}).tier_of("someone") == "bronze"
