"""Histograms that a scrape reads: counts by upper bound, as Prometheus wants them. No locks: one event loop writes."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

INFINITY = float("inf")


class Histogram:
    """How many values were at most each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; what a stepped clock made negative counts as 0."""
        value = max(0.0, value)
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Their sum."""
        return self._sum

    def show(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this as one child of `family`."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*self._bounds, INFINITY], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == INFINITY else repr(float(bound)), total))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class Histograms:
    """One histogram for each combination of label values; callers bound those."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._children: dict[tuple[str, ...], Histogram] = {}

    def __getitem__(self, labels: tuple[str, ...]) -> Histogram:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = Histogram(self._bounds)
        return child

    def items(self) -> list[tuple[tuple[str, ...], Histogram]]:
        """All of them, in the order of their label values."""
        return sorted(self._children.items())

    def family(self, name: str, text: str, labels: Sequence[str]) -> HistogramMetricFamily:
        """All of them as one family."""
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, child in self.items():
            child.show(family, values)
        return family
