"""What `/metrics` shows: read from the parts at each scrape, so there is nothing to keep in step.

Labels are closed sets (outcomes, error codes) and at most `TEAMS_MAX` teams; never a key, a user or a request.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.messages import ServiceSamples
from gateway.admin import render_metrics
from gateway.state import GatewayState
from tenants.leases import Leases
from tenants.ledger import Ledger
from tenants.snapshot import Snapshot

TEAMS_MAX = 500
OTHER = "other"


class GatewayMetrics(Collector):
    """Sums service samples by team and reads the rest when asked."""

    def __init__(self, state: GatewayState, leases: Leases, ledger: Ledger) -> None:
        self._state = state
        self._leases = leases
        self._ledger = ledger
        self._team_us: dict[int, dict[str, float]] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return render_metrics(self._registry)

    def add(self, samples: ServiceSamples) -> None:
        """One interval of the engine's samples."""
        for team in samples.teams:
            sums = self._team_us.setdefault(
                team.team_id, dict.fromkeys(("served", "entitled", "promotions", "lag"), 0.0)
            )
            sums["served"] += team.served_us
            sums["entitled"] += team.entitled_us
            sums["promotions"] += team.promotions
            sums["lag"] = team.lag_max_us

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        state = self._state
        ended = CounterMetricFamily("terazi_requests", "Requests that ended, by outcome.", labels=["outcome"])
        for outcome, count in sorted(state.ended.items()):
            ended.add_metric([outcome], count)
        refused = CounterMetricFamily("terazi_refusals", "Refused calls, by error code.", labels=["code"])
        for code, count in sorted(state.refused.items()):
            refused.add_metric([code], count)
        yield ended
        yield refused
        hello = state.engine.hello
        # The latest step says what it ran; when nothing is open, nothing runs and every block is free.
        step = state.engine.latest_step if state.engine.num_streams else None
        free_blocks = step.num_free_blocks if step else hello.num_device_blocks if hello else 0
        yield _gauge("terazi_ready", "1 when requests can be served.", not not_ready_reasons(state))
        yield _gauge("terazi_inflight", "Requests in the engine.", state.engine.num_streams)
        yield _gauge("terazi_running", "Sequences in the latest step.", step.num_running if step else 0)
        yield _gauge("terazi_queued", "Sequences waiting after the latest step.", step.num_waiting if step else 0)
        yield _gauge("terazi_free_blocks", "Free KV blocks on the device.", free_blocks)
        yield _gauge("terazi_reservations_outstanding", "Reservations not settled yet.", self._leases.outstanding())
        yield _gauge("terazi_journal_open", "Requests opened in the journal and not closed.", self._ledger.num_open)
        yield _gauge("terazi_ledger_backlog", "Ended requests whose rows are not in SQL yet.", self._ledger.backlog)
        yield CounterMetricFamily(
            "terazi_store_errors", "SQL transactions that failed.", value=self._ledger.num_failures
        )
        yield from self._teams(state.snapshot_holder.current)

    def _teams(self, snapshot: Snapshot) -> Iterable[Metric]:
        names = {team.team_id: team.name for team in snapshot.teams[:TEAMS_MAX]}
        sums: dict[str, dict[str, float]] = {}
        for team_id, values in self._team_us.items():
            into = sums.setdefault(names.get(team_id, OTHER), dict.fromkeys(values, 0.0))
            for name, value in values.items():
                into[name] += value
        for metric, key, scale, text in (
            ("terazi_device_seconds", "served", 1e6, "Device seconds charged."),
            ("terazi_entitled_device_seconds", "entitled", 1e6, "Device seconds the team was entitled to."),
            ("terazi_promotions", "promotions", 1.0, "Starvation promotions."),
        ):
            family = CounterMetricFamily(metric, text, labels=["team"])
            for team, values in sorted(sums.items()):
                family.add_metric([team], values[key] / scale)
            yield family
        lag = GaugeMetricFamily("terazi_service_lag_seconds", "Largest lag of the latest interval.", labels=["team"])
        for team, values in sorted(sums.items()):
            lag.add_metric([team], values["lag"] / 1e6)
        yield lag


def not_ready_reasons(state: GatewayState) -> list[str]:
    """Why no request can be served now, as `/readyz` of both listeners says; empty when one can."""
    facts = {
        "draining": state.is_draining,
        "starting": state.tokenizer is None,
        "engine_unavailable": state.tokenizer is not None and not state.engine.is_ready,
        "engine_silent": state.engine.silent_seconds > state.settings.engine_silence,
        "store_unavailable": not state.ledger.has_room,
    }
    return [reason for reason, is_so in facts.items() if is_so]


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))
