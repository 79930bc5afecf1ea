"""The declared list of team counters: what is counted for each team, and where each counter is shown.

This is the only list. A counter is one field below. From the fields follow the service sample on the wire, the sample's
row, the columns of `service_samples` and `service_hours`, the sums of the reports, the families of `/metrics`, the
lines of the fairness report and the table in `docs/metrics.md`. CONTRIBUTING.md says how a counter is added.

The engine's sampler turns running totals into one interval's figures, once a second:

* A `SUM` counter of `CountedByPolicy` is a running total, `TeamShare.totals[name]`. The sampler subtracts the total
  that it saw last. For example, totals of 700 and then 1000 become samples of 700 and 300.
* Every other counter is taken as it is at the end of the interval.

A name ends in its unit: `_us` and `_ms` are shown to users as seconds, any other name as a plain number.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class Over(Enum):
    """How the figures of several intervals become one figure: that of an hour, or of a report's period."""

    SUM = "sum"
    LEAST = "least"
    MOST = "most"
    LATEST = "latest"
    SECONDS = "by the second only"  # not kept in the sums by the hour, and in no report


@dataclass(frozen=True, slots=True)
class TeamCounter:
    """One counter as declared. `kind` is int or float."""

    name: str
    kind: type[int] | type[float]
    over: Over
    text: str  # what it counts: the help of its metric, and its line in docs/metrics.md
    metric: str | None = None  # its Prometheus family: a counter for SUM, else a gauge of the latest interval
    report: str | None = None  # its name in a team's line of the fairness report
    is_null_at_zero: bool = False  # the report says null for 0

    @property
    def per_shown(self) -> int:
        """How many of its unit make one of the unit that users see; 1 for a plain number."""
        return {"us": 1_000_000, "ms": 1_000}.get(self.name.rpartition("_")[2], 1)

    def shown(self, value: float) -> float | None:
        """`value` as the fairness report says it: seconds, or the plain number."""
        if self.is_null_at_zero and not value:
            return None
        return value if self.per_shown == 1 else value / self.per_shown


def _counter(
    over: Over,
    text: str,
    *,
    metric: str | None = None,
    report: str | None = None,
    is_null_at_zero: bool = False,
) -> Any:
    """Declares a counter: the keywords are those of `TeamCounter`. Typed as Any, so that its field may be int or float.

    The default of 0 is what a sample says that nobody has counted anything in.
    """
    declared = {"over": over, "text": text, "metric": metric, "report": report, "is_null_at_zero": is_null_at_zero}
    return field(default=0, metadata=declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedByPolicy:
    """The counters that a policy fills: SUM ones in `TeamShare.totals`, the others in `MeteredPolicy.team_service`."""

    # The families of the first two divide device seconds by phase (`gateway.metrics.teams`).
    served_us: int = _counter(Over.SUM, "Device seconds charged.", report="device_seconds")
    overhead_us: int = _counter(
        Over.SUM,
        "Device seconds of the copies and replays that the team caused. A part of `served_us`.",
        report="overhead_device_seconds",
    )
    entitled_us: int = _counter(
        Over.SUM,
        "Device seconds that the team was entitled to while it had work.",
        metric="terazi_entitled_device_seconds",
    )
    # Its family has the tier as label too (`gateway.metrics.teams`).
    promotions: int = _counter(Over.SUM, "Grants given to starving sequences.", report="promotions")
    exhausted: int = _counter(
        Over.SUM,
        "Times a starving sequence found its team's promotion budget too small.",
        metric="terazi_promotion_budget_exhausted",
        report="promotions_exhausted",
    )
    promoted_us: int = _counter(Over.SUM, "Work done under grants.", report="promoted_seconds")
    budget_us: int = _counter(
        Over.LATEST,
        "Work in seconds that the team's starving requests may still be promoted by; of `other` the least.",
        metric="terazi_promotion_budget_remaining",
        report="promotion_budget_seconds",
    )
    starving: int = _counter(Over.MOST, "Sequences waiting for a grant.")
    waiting: int = _counter(Over.SECONDS, "Sequences not in the latest step.")
    running: int = _counter(Over.SECONDS, "Sequences in the latest step.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamCounters(CountedByPolicy):
    """All counters: a policy's, and those that the engine fills (`engine.process.samples`)."""

    backlogged_ms: int = _counter(
        Over.SUM, "Time in which the team had a sequence left waiting.", report="backlogged_seconds"
    )
    lag_min_us: float = _counter(
        Over.LEAST, "Least lag D, in device seconds per unit of weight.", report="lag_min_seconds"
    )
    lag_max_us: float = _counter(
        Over.MOST,
        "Largest lag D of the team's latest interval in the last 60 s, in device seconds per unit of weight.",
        metric="terazi_service_lag_seconds",
        report="lag_max_seconds",
    )
    bytes_swapped_out: int = _counter(Over.SUM, "KV of its sequences copied to the host, whoever caused it.")
    bytes_swapped_in: int = _counter(Over.SUM, "KV of its sequences copied to the device, whoever caused it.")
    longest_pause_us: int = _counter(
        Over.MOST, "Longest pause that ended in the interval.", report="longest_pause_seconds"
    )
    pause_bound_us: int = _counter(
        Over.MOST,
        "Maximum pause (I8) for the team's present queue; 0 is no bound.",
        report="pause_bound_seconds",
        is_null_at_zero=True,
    )


def declared_in(kind: type[CountedByPolicy]) -> tuple[TeamCounter, ...]:
    """The counters of `kind` in their order."""
    found = []
    for one in fields(kind):
        if one.metadata:  # a subclass's own fields, such as team_id, are no counters
            assert one.type in (int, float), one.name
            found.append(TeamCounter(name=one.name, kind=int if one.type is int else float, **one.metadata))
    return tuple(found)


POLICY_COUNTERS = declared_in(CountedByPolicy)
TEAM_COUNTERS = declared_in(TeamCounters)


def names_over(over: Over) -> tuple[str, ...]:
    """The names of the counters that are put together over time by `over`."""
    return tuple(counter.name for counter in TEAM_COUNTERS if counter.over is over)


# What `TeamShare.totals` holds.
POLICY_TOTALS = tuple(counter.name for counter in POLICY_COUNTERS if counter.over is Over.SUM)


def values(record: CountedByPolicy, counters: tuple[TeamCounter, ...] = TEAM_COUNTERS) -> dict[str, Any]:
    """What `record` says for each of `counters`, by name."""
    return {counter.name: getattr(record, counter.name) for counter in counters}
