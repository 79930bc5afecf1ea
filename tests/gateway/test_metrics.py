"""Team labels are bounded, and what cannot be named any more is `other`."""

from types import SimpleNamespace
from typing import Any, cast

from engine.messages import ServiceSamples, TeamSample
from gateway import metrics
from gateway.metrics import GatewayMetrics


def make(num_teams: int) -> GatewayMetrics:
    teams = tuple(SimpleNamespace(team_id=i, name=f"team-{i}") for i in range(num_teams))
    engine = SimpleNamespace(latest_step=None, hello=None, num_streams=0, is_ready=False, silent_seconds=0.0)
    ledger = SimpleNamespace(num_open=0, backlog=0, num_failures=2, has_room=True)
    state = SimpleNamespace(
        snapshot_holder=SimpleNamespace(current=SimpleNamespace(teams=teams)),
        engine=engine,
        ledger=ledger,
        tokenizer=None,
        is_draining=False,
        settings=SimpleNamespace(engine_silence=30.0),
        ended={"ok": 3},
        refused={"tokens": 1},
    )
    return GatewayMetrics(cast(Any, state), cast(Any, SimpleNamespace(outstanding=lambda: 0)), cast(Any, ledger))


def sample(team_id: int, served_us: int) -> TeamSample:
    return TeamSample(
        team_id=team_id,
        served_us=served_us,
        entitled_us=served_us // 2,
        backlogged_ms=0,
        waiting=0,
        running=0,
        lag_min_us=-5e5,
        lag_max_us=2.5e6,
        promotions=1,
    )


def test_samples_add_up_by_team_and_lag_is_the_latest() -> None:
    shown = make(2)
    for _ in range(2):
        shown.add(ServiceSamples(interval_ms=1000, teams=(sample(0, 1_500_000), sample(1, 500_000))))
    text = shown.render().decode()
    assert 'terazi_device_seconds_total{team="team-0"} 3.0' in text
    assert 'terazi_entitled_device_seconds_total{team="team-1"} 0.5' in text
    assert 'terazi_promotions_total{team="team-1"} 2.0' in text
    assert 'terazi_service_lag_seconds{team="team-0"} 2.5' in text
    assert 'terazi_requests_total{outcome="ok"} 3.0' in text
    assert 'terazi_refusals_total{code="tokens"} 1.0' in text
    assert "terazi_store_errors_total 2.0" in text
    assert "terazi_ready 0.0" in text


def test_labels_are_bounded_and_unknown_teams_are_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "TEAMS_MAX", 3)
    shown = make(10)
    shown.add(ServiceSamples(interval_ms=1000, teams=tuple(sample(i, 1_000_000) for i in range(12))))
    text = shown.render().decode()
    assert text.count("terazi_device_seconds_total{") == 4
    assert 'terazi_device_seconds_total{team="other"} 9.0' in text
