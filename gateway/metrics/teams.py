"""The families of `/metrics` that have a team as label: its counters, and its share of the last minute.

A declared counter with a `metric` gets its family here (`policies.team_counters`). Families with more labels than the
team, and those that are worked out from several counters, are written out.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.metrics.requests import Meters
from gateway.metrics.shares import ServiceMeters
from policies.team_counters import TEAM_COUNTERS, Over


def team_counters(meters: Meters, service: ServiceMeters) -> Iterable[Metric]:
    """What each team has had since this process started; counts only grow."""
    team_labels = ["team", "tier", "model", "outcome"]
    requests = CounterMetricFamily("terazi_requests", "Requests that ended, by outcome.", labels=team_labels)
    text = "Tokens of requests that ended: prompt, and output really generated."
    tokens = CounterMetricFamily("terazi_tokens", text, labels=["team", "model", "type"])
    text = "Device seconds charged: compute, and overhead (copies and replays that the team caused)."
    device = CounterMetricFamily("terazi_device_seconds", text, labels=["team", "phase"])
    text = "Grants given to starving sequences."
    promotions = CounterMetricFamily("terazi_promotions", text, labels=["team", "tier"])
    declared = {
        counter: CounterMetricFamily(counter.metric, counter.text, labels=["team"])
        for counter in TEAM_COUNTERS
        if counter.metric is not None and counter.over is Over.SUM
    }
    for team, counts in meters.teams():
        for labels, count in sorted(counts.requests.items()):
            requests.add_metric([team, *labels], count)
        for token_labels, count in sorted(counts.tokens.items()):
            tokens.add_metric([team, *token_labels], count)
        served_us, overhead_us = counts.totals["served_us"], counts.totals["overhead_us"]
        device.add_metric([team, "compute"], (served_us - overhead_us) / 1e6)
        device.add_metric([team, "overhead"], overhead_us / 1e6)
        for tier, count in sorted(counts.promotions.items()):
            promotions.add_metric([team, tier], count)
        for counter, family in declared.items():
            family.add_metric([team], counts.totals[counter.name] / counter.per_shown)
    yield from (requests, tokens, device, promotions, *declared.values())
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
    declared = {
        counter: GaugeMetricFamily(counter.metric, counter.text, labels=["team"])
        for counter in TEAM_COUNTERS
        if counter.metric is not None and counter.over is not Over.SUM
    }
    for place, samples in sorted(service.latest().items()):
        for counter, family in declared.items():
            values = [getattr(sample, counter.name) for sample in samples]
            # The teams of `other` show the largest where the largest counts, and else the least.
            value = max(values) if counter.over is Over.MOST else min(values)
            family.add_metric([meters.label(place)], value / counter.per_shown)
    text = (
        "Weighted Jain index of served / entitled over the teams backlogged in the last 60 s: 1 when all got the "
        "same part of what they were entitled to. Absent when no team was."
    )
    jain = GaugeMetricFamily("terazi_jain_index", text)
    index = service.jain()
    if index is not None:
        jain.add_metric([], index)
    yield from (achieved, entitled, *declared.values(), jain)
