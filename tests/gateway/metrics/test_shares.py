"""Shares of the device as metrics: of the time a team had work, over the last minute."""

import pytest

from tests.support.gateway.harness import gateway
from tests.support.gateway.metrics import BRONZE, Shown, interval, sample

pytestmark = pytest.mark.anyio


async def test_shares_are_of_backlogged_time_and_of_the_last_minute() -> None:
    async with gateway() as g:
        shown = Shown(g)
        g.holder.add("team-b", tier=BRONZE)
        assert "terazi_jain_index" not in {name for name, _ in shown.scrape()}
        shown.metrics.add(interval(sample(1, 100), sample(2, 900, backlogged_ms=0)))
        g.clock.advance(30)
        shown.metrics.add(interval(sample(1, 300, 400), sample(2, 100, 100)))
        assert shown.values("terazi_share_achieved", "team") == {"team-a": 400 / 1400, "team-b": 0.25}
        assert shown.values("terazi_share_entitled", "team") == {"team-a": 500 / 1500, "team-b": 0.2}
        ratio_a, ratio_b = 400 / 500, 1.0  # weights 4 and 1
        jain = (4 * ratio_a + ratio_b) ** 2 / (5 * (4 * ratio_a**2 + ratio_b**2))
        assert shown.value("terazi_jain_index") == pytest.approx(jain)
        g.clock.advance(30)  # the first interval is a minute old
        assert shown.values("terazi_share_achieved", "team") == {"team-a": 0.75, "team-b": 0.25}
        g.clock.advance(30)
        names = {name for name, _ in shown.scrape()}
        assert not names & {"terazi_share_achieved", "terazi_service_lag_seconds", "terazi_jain_index"}
        assert shown.value("terazi_device_seconds_total", team="team-a", phase="compute") == 400e-6
