"""What is plotted: every team at every moment, and no more moments than a plot can show."""

import math

import pytest

from tenants import reports
from tenants.reports import series
from tenants.reports.periods import Period
from tenants.reports.samples import HOUR_US
from tenants.retention import Retention
from tenants.rows import ServiceSampleRow
from tests.support.tenants import histories
from tests.support.tenants.histories import SECOND_US, TEAMS
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio
START_US = NOW_US // HOUR_US * HOUR_US


async def sampled(store: Store, seconds: int, every: int = 1) -> dict[str, list[ServiceSampleRow]]:
    ids = {team: await store.team(team, tier) for team, tier in TEAMS.items()}
    rows = histories.samples(5, team_ids=list(ids.values()), start_us=START_US, seconds=seconds, every=every)
    await histories.book_samples(store, rows)
    services = [row for row in rows if isinstance(row, ServiceSampleRow)]
    return {team: [row for row in services if row.team_id == team_id] for team, team_id in ids.items()}


async def test_a_series_has_every_team_at_every_moment(store: Store) -> None:
    rows = await sampled(store, 60)
    async with store.database.session() as connection:
        found = await reports.service_series(connection, Period(START_US + 5 * SECOND_US, START_US + 50 * SECOND_US))
    moments = sorted({row.at_us for own in rows.values() for row in own})[5:50]
    assert found["at"] == [at / 1e6 for at in moments]
    assert found["interval_seconds"] == [1.0] * 45
    for team, own in rows.items():
        at = {row.at_us: row for row in own}
        for i, moment in enumerate(moments):
            row = at.get(moment)
            assert found["served"][team][i] == (row.served_us / 1e6 if row else 0.0)
            assert found["entitled"][team][i] == (row.entitled_us / 1e6 if row else 0.0)
            assert found["backlogged"][team][i] == (row.backlogged_ms / 1e3 if row else 0.0)
            assert found["lag"][team][i] == pytest.approx(row.lag_max_us / 1e6 if row else 0.0)
            if row:
                assert found["lag_bound"][i] == pytest.approx(row.lag_bound_us / 1e6)


@pytest.mark.parametrize(("seconds", "width"), [(50, 1.0), (51, 2.0), (199, 4.0), (201, 5.0)])
async def test_more_moments_than_a_plot_can_show_are_put_together(
    store: Store, monkeypatch: pytest.MonkeyPatch, seconds: int, width: float
) -> None:
    monkeypatch.setattr(series, "MOMENTS_MAX", 50)
    rows = await sampled(store, seconds)
    async with store.database.session() as connection:
        found = await reports.service_series(connection, Period(0, NOW_US * 2))
    assert len(found["at"]) <= 51  # the first and the last may be cut
    assert {round(b - a, 6) for a, b in zip(found["at"], found["at"][1:], strict=False)} == {width}
    for team, own in rows.items():
        assert math.fsum(found["served"][team]) == pytest.approx(sum(row.served_us for row in own) / 1e6)
        assert math.fsum(found["backlogged"][team]) == pytest.approx(sum(row.backlogged_ms for row in own) / 1e3)
        assert max(found["lag"][team]) == pytest.approx(max(row.lag_max_us for row in own) / 1e6)
        assert max(found["backlogged"][team]) <= max(found["interval_seconds"]) <= width


async def test_hours_stand_where_seconds_are_gone(store: Store) -> None:
    rows = await sampled(store, 100, every=100)  # over almost three hours
    await histories.settle_retention(
        Retention(store.database, seconds_kept_hours=1, hours_kept_days=9), START_US + 3 * HOUR_US
    )
    async with store.database.session() as connection:
        found = await reports.service_series(connection, Period(START_US, START_US + 3 * HOUR_US))
    hours = [(START_US + HOUR_US) / 1e6, (START_US + 2 * HOUR_US) / 1e6]
    seconds = sorted({row.at_us / 1e6 for own in rows.values() for row in own if row.at_us >= START_US + 2 * HOUR_US})
    assert found["at"] == [hours[0], *sorted({hours[1], *seconds})]
    for team, own in rows.items():
        assert math.fsum(found["served"][team]) == pytest.approx(sum(row.served_us for row in own) / 1e6)
