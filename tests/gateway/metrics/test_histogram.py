"""Histograms: a value counts where it is at most the bound."""

from prometheus_client.core import HistogramMetricFamily

from gateway.metrics.histogram import Histogram, Histograms


def buckets(family: HistogramMetricFamily) -> dict[str, float]:
    return {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}


def test_buckets_are_cumulative_and_hold_their_bound() -> None:
    one = Histogram((1, 2.5))
    for value in (1, 1.5, 2.5, 3, -4):  # a clock that was set back gives a negative one
        one.observe(value)
    family = HistogramMetricFamily("x_seconds", "X.", labels=["team"])
    one.show(family, ["a"])
    assert buckets(family) == {"1.0": 2, "2.5": 4, "+Inf": 5}
    assert (one.count, one.sum) == (5, 8.0)


def test_each_combination_of_labels_has_its_own() -> None:
    many = Histograms((1,))
    many[("b",)].observe(5)
    many[("a",)].observe(1)
    many[("b",)].observe(7)
    assert [(labels, child.count, child.sum) for labels, child in many.items()] == [(("a",), 1, 1.0), (("b",), 2, 12.0)]
    sums = [s.value for s in many.family("x_seconds", "X.", ["team"]).samples if s.name == "x_seconds_sum"]
    assert sums == [1.0, 12.0]
