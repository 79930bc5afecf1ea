"""A whole server under memory pressure: what its metrics, its reports and its ledger say of one run is one story."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.e2e.server import Server, wait_until

MakeServer = Callable[..., Server]
FLAGS = ["--kv-memory", "192KiB", "--host-kv-memory", "1MiB", "--max-batch-size", "4"]  # 32 device blocks
REQUESTS = {"light": (8, 20), "heavy": (10, 70)}  # how many, of how many tokens each


def sums_of(server: Server, *labels: str) -> Counter[tuple[str, ...]]:
    """Every sample by name and the given labels."""
    token = (server.data_dir / "admin.token").read_text().strip()
    text = httpx.get(f"{server.info['admin_url']}/metrics", headers={"authorization": f"Bearer {token}"}).text
    sums: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[(sample.name, *(sample.labels.get(label, "") for label in labels))] += sample.value  # type: ignore[assignment]
    return sums


def test_when_memory_is_short_metrics_and_reports_agree(make_server: MakeServer) -> None:
    server = make_server().start(*FLAGS)
    keys = {"light": server.make_key("light", "gold"), "heavy": server.make_key("heavy", "bronze")}
    shown = server.admin("GET", "teams")["data"]
    for tier in server.admin("GET", "tiers")["data"]:
        (own,) = [team for team in shown if team["tier"] == tier["name"]] or [None]
        assert tier["max_pause_seconds"] == (own and own["max_pause_seconds"])
        assert (tier["max_pause_unknown"] is None) == (own is not None)

    def ask(team: str) -> int:
        body = {"model": "tiny-random", "prompt": "x" * 40, "max_tokens": REQUESTS[team][1], "ignore_eos": True}
        headers = {"authorization": f"Bearer {keys[team]}"}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120).status_code

    wanted = [team for team, (count, _) in REQUESTS.items() for _ in range(count)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        assert set(pool.map(ask, wanted)) == {200}
    usage = {line["team"]: line for line in server.admin("GET", "reports/usage")["data"]}

    def is_all_sampled() -> bool:
        """Device time is in the ledger, but for copies that a team caused and after which none of its requests ran."""
        sums, phases = sums_of(server, "team"), sums_of(server, "team", "phase")
        for team, line in usage.items():
            over = sums["terazi_device_seconds_total", team] - line["device_seconds"]
            if not -1e-9 <= over <= phases["terazi_device_seconds_total", team, "overhead"] + 1e-9:
                return False
        return True

    wait_until(is_all_sampled, "the engine's samples sum up to the ledger")
    by_team, plain, by_direction = sums_of(server, "team"), sums_of(server), sums_of(server, "direction")
    for team, (count, tokens) in REQUESTS.items():
        assert by_team["terazi_requests_total", team] == usage[team]["requests"] == count
        assert usage[team]["output_tokens"] == count * tokens
        assert by_team["terazi_tokens_total", team] == usage[team]["prompt_tokens"] + usage[team]["output_tokens"]
        assert by_team["terazi_promotions_total", team] == usage[team]["promotions"]
    fairness = server.admin("GET", "reports/fairness")
    totals = fairness["totals"]
    assert totals["swaps_out"] > 0, "the pool was too large to show anything"
    for direction in ("out", "in"):
        assert by_direction["terazi_swaps_total", direction] == totals[f"swaps_{direction}"]
        assert by_direction["terazi_swapped_bytes_total", direction] == totals[f"bytes_{direction}"]
    assert plain["terazi_preemptions_total",] == totals["preemptions"] == sum(u["preemptions"] for u in usage.values())
    assert plain["terazi_recomputes_total",] == totals["recomputes"]
    assert plain["terazi_kv_blocks_used_peak",] >= 32
    bounds = {tier["tier"]: tier["pause_bound_seconds"] for tier in fairness["tiers"]}
    for team in server.admin("GET", "teams")["data"]:
        # None: nobody of the tier starved. What held for the queue there was is within what is promised for any.
        assert (bounds[team["tier"]] or 0) <= team["max_pause_seconds"]
