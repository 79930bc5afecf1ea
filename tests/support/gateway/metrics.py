"""`/metrics` for tests: read back through Prometheus' own parser, and samples to feed it with."""

from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine.wire.messages import ServiceSamples, TeamSample
from gateway.metrics.families import GatewayMetrics
from policies.tiers import DEFAULT_TIERS
from tenants.quotas import Limits
from tests.support.gateway.harness import Gateway, eventually

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Shown:
    """The metrics of one gateway, as a scraper reads them."""

    def __init__(self, g: Gateway) -> None:
        self.metrics = GatewayMetrics(g.state, g.state.leases, g.ledger, clock=g.clock.monotonic)
        self.types: dict[str, str] = {}

    def scrape(self) -> Series:
        found: Series = {}
        names: set[str] = set()
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            assert family.documentation, family.name
            assert family.name not in names
            names.add(family.name)
            self.types[family.name] = family.type
            for sample in family.samples:
                series = (sample.name, tuple(sorted(sample.labels.items())))
                assert series not in found, series
                found[series] = sample.value
        return found

    def values(self, name: str, *labels: str) -> dict[Any, float]:
        """Values of one name by the given labels, others summed."""
        sums: Counter[Any] = Counter()
        for (series, pairs), value in self.scrape().items():
            if series == name:
                by = tuple(dict(pairs)[label] for label in labels)
                sums[by[0] if len(by) == 1 else by] += value  # type: ignore[assignment]
        return dict(sums)

    def value(self, name: str, **labels: str) -> float:
        return self.scrape()[name, tuple(sorted(labels.items()))]


def sample(team_id: int, served_us: int, entitled_us: int | None = None, **fields: Any) -> TeamSample:
    """A sample of a team that was backlogged throughout."""
    given = {"backlogged_ms": 1000, "waiting": 1, "running": 1, "lag_min_us": 0.0, "lag_max_us": 0.0, **fields}
    entitled_us = served_us if entitled_us is None else entitled_us
    return TeamSample(team_id=team_id, served_us=served_us, entitled_us=entitled_us, **given)


async def arrived(g: Gateway, step_id: int) -> None:
    """Wait until the gateway has read this step."""
    engine = g.state.engine
    await eventually(lambda: engine.latest_step is not None and engine.latest_step.step_id == step_id)


def interval(*teams: TeamSample, **fields: Any) -> ServiceSamples:
    return ServiceSamples(interval_ms=1000, teams=teams, **fields)


GOLD, SILVER, BRONZE = DEFAULT_TIERS


def team_entry(number: int) -> dict[str, Any]:
    return {"team_id": number, "name": f"team-{number}", "tier": SILVER, "limits": Limits(concurrent=number)}


async def one_row(g: Gateway) -> Any:
    g.engine.script = g.engine.saying("ok")
    await g.chat()
    return g.ledger.rows[-1]
