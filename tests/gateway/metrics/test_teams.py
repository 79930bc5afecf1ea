"""Teams as labels: at most 500, and nothing of the others is lost."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tenants.quotas import Limits
from tests.support.gateway.harness import gateway
from tests.support.gateway.metrics import Shown, interval, sample, team_entry

pytestmark = pytest.mark.anyio


@pytest.mark.case("G37", "G66")
async def test_teams_beyond_500_are_other_and_nothing_is_lost() -> None:
    async with gateway(limits=Limits(concurrent=3)) as g:
        shown = Shown(g)
        for number in range(2, 601):
            g.holder.teams.append(cast(Any, SimpleNamespace(**team_entry(number))))
        g.holder.add("last")
        teams = tuple(sample(number, 1_000_000, promotions=1, budget_us=number) for number in range(1, 702))
        shown.metrics.add(interval(*teams))
        device = shown.values("terazi_device_seconds_total", "team")
        assert len(device) == 501 and device["other"] == 201 and sum(device.values()) == 701
        shares = shown.values("terazi_share_achieved", "team")
        assert len(shares) == 501 and sum(shares.values()) == pytest.approx(1)
        assert shown.value("terazi_promotion_budget_remaining", team="other") == 501e-6
        limits = shown.values("terazi_limit_remaining", "team", "kind")
        assert len(limits) == 500 and limits[("team-a", "concurrent")] == 3
        lines = shown.metrics.render().count(b"\n")
        assert len(shown.metrics.render()) < 1 << 20
        for number in range(1000, 1020):  # teams that nobody has ever made
            shown.metrics.add(interval(*(sample(100 * number + i, 1) for i in range(100))))
        assert shown.metrics.render().count(b"\n") == lines


@pytest.mark.case("G66")
async def test_an_archived_team_frees_its_place_and_other_never_falls() -> None:
    async with gateway() as g:
        shown = Shown(g)
        g.state.meters._teams_max = 1
        g.holder.add("team-b")
        shown.metrics.add(interval(sample(1, 5_000_000), sample(2, 1_000_000)))
        assert shown.values("terazi_device_seconds_total", "team") == {"team-a": 5, "other": 1}
        g.holder.teams = [cast(Any, SimpleNamespace(**team_entry(2)))]
        g.holder.add("team-2")
        assert shown.values("terazi_device_seconds_total", "team") == {"other": 1}
        shown.metrics.add(interval(sample(1, 7_000_000), sample(2, 2_000_000)))
        assert shown.values("terazi_device_seconds_total", "team") == {"other": 8, "team-2": 2}


async def test_limits_alone_give_no_more_than_500_teams_a_series() -> None:
    async with gateway(limits=Limits(requests_per_minute=2)) as g:
        shown = Shown(g)
        for number in range(2, 601):
            g.holder.teams.append(cast(Any, SimpleNamespace(**team_entry(number))))
        g.holder.add("unlimited")
        g.engine.script = g.engine.saying("ok")
        remaining = []
        for _ in range(3):
            remaining.append(shown.values("terazi_limit_remaining", "team", "kind")[("team-a", "requests")])
            await g.chat()
        assert remaining == [2, 1, 0]
        assert len(shown.values("terazi_limit_remaining", "team")) == 500
        assert "unlimited" not in shown.values("terazi_limit_remaining", "team")
