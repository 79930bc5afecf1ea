"""The families of `/metrics` that have a team as label: its counters, and its share of the last minute."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.metrics.requests import Meters
from gateway.metrics.shares import ServiceMeters


def team_counters(meters: Meters, service: ServiceMeters) -> Iterable[Metric]:
    """What each team has had since this process started; counts only grow."""
    team_labels = ["team", "tier", "model", "outcome"]
    requests = CounterMetricFamily("terazi_requests", "Requests that ended, by outcome.", labels=team_labels)
    text = "Tokens of requests that ended: prompt, and output really generated."
    tokens = CounterMetricFamily("terazi_tokens", text, labels=["team", "model", "type"])
    text = "Device seconds charged: compute, and overhead (copies and replays that the team caused)."
    device = CounterMetricFamily("terazi_device_seconds", text, labels=["team", "phase"])
    text = "Device seconds that the team was entitled to while it had work."
    entitled = CounterMetricFamily("terazi_entitled_device_seconds", text, labels=["team"])
    text = "Grants given to starving sequences."
    promotions = CounterMetricFamily("terazi_promotions", text, labels=["team", "tier"])
    text = "Times a starving sequence found its team's promotion budget too small."
    exhausted = CounterMetricFamily("terazi_promotion_budget_exhausted", text, labels=["team"])
    for team, counts in meters.teams():
        for labels, count in sorted(counts.requests.items()):
            requests.add_metric([team, *labels], count)
        for token_labels, count in sorted(counts.tokens.items()):
            tokens.add_metric([team, *token_labels], count)
        device.add_metric([team, "compute"], (counts.served_us - counts.overhead_us) / 1e6)
        device.add_metric([team, "overhead"], counts.overhead_us / 1e6)
        entitled.add_metric([team], counts.entitled_us / 1e6)
        for tier, count in sorted(counts.promotions.items()):
            promotions.add_metric([team, tier], count)
        exhausted.add_metric([team], counts.exhausted)
    yield from (requests, tokens, device, entitled, promotions, exhausted)
    text = (
        "Device seconds without a whole answer: of requests that ended as disconnect, error or shutdown, and "
        "overhead (copies and replays of all requests)."
    )
    wasted = CounterMetricFamily("terazi_wasted_device_seconds", text, labels=["reason"])
    for reason, amount_us in sorted((meters.wasted_us | {"overhead": service.overhead_us}).items()):
        wasted.add_metric([reason], amount_us / 1e6)
    yield wasted


def team_gauges(meters: Meters, service: ServiceMeters) -> Iterable[Metric]:
    text = "part of the device time in the intervals of the last 60 s in which the team was backlogged."
    achieved = GaugeMetricFamily("terazi_share_achieved", f"The team's {text}", labels=["team"])
    entitled = GaugeMetricFamily("terazi_share_entitled", f"What the team was entitled to, as {text}", labels=["team"])
    for place, share in sorted(service.shares().items()):
        for family, value in ((achieved, share.achieved), (entitled, share.entitled)):
            if value is not None:
                family.add_metric([meters.label(place)], value)
    text = "Largest lag D of the team's latest interval in the last 60 s, in device seconds per unit of weight."
    lag = GaugeMetricFamily("terazi_service_lag_seconds", text, labels=["team"])
    text = "Work in seconds that the team's starving requests may still be promoted by; of `other` the least."
    budget = GaugeMetricFamily("terazi_promotion_budget_remaining", text, labels=["team"])
    for place, samples in sorted(service.latest().items()):
        label = [meters.label(place)]
        lag.add_metric(label, max(sample.lag_max_us for sample in samples) / 1e6)
        budget.add_metric(label, min(sample.budget_us for sample in samples) / 1e6)
    text = (
        "Weighted Jain index of served / entitled over the teams backlogged in the last 60 s: 1 when all got the "
        "same part of what they were entitled to. Absent when no team was."
    )
    jain = GaugeMetricFamily("terazi_jain_index", text)
    index = service.jain()
    if index is not None:
        jain.add_metric([], index)
    yield from (achieved, entitled, lag, budget, jain)
