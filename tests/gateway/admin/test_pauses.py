"""Maximum pauses as the admin API shows them."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.wire.messages import PolicyInfo
from gateway.admin import pauses
from gateway.admin.app import AdminState
from policies.bounds import pause_bound_us
from policies.config import PolicyConfig
from policies.sequences import TeamTerms
from tests.support.gateway import fake_engine
from tests.support.gateway.admin import V1, client_of
from tests.support.tenants.stores import Store

pytestmark = pytest.mark.anyio

CONSTANTS = PolicyInfo(
    levels=8,
    base_quantum_us=50_000,
    fairness_window_us=1_000_000,
    step_cost_max_us=250_000,
    promotion_percent=20,
    grant_us=200_000,
    upload_max_us=30_000,
)


def pause_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[f"max_pause_{name}"] for name in ("seconds", "empty_queue_seconds", "queue", "unknown"))


def bound(team_id: int, num_ahead: int) -> float:
    """What the policy says (its own tests say that it holds), of one gold and one bronze team, in seconds."""
    config = PolicyConfig(
        levels=8,
        base_quantum_us=50_000,
        fairness_window_us=1_000_000,
        step_cost_max_us=250_000,
        promotion_percent=20,
        grant_us=200_000,
    )
    gold = TeamTerms(1, weight=4, start_level=0, starving_after_us=300_000, promotion_burst_grants=4)
    bronze = TeamTerms(2, weight=1, start_level=2, starving_after_us=3_000_000, promotion_burst_grants=2)
    return pause_bound_us(config, [gold, bronze], team_id, num_ahead, 30_000, is_short=True) / 1e6


async def test_the_maximum_pause_is_shown_for_teams_and_tiers(state: AdminState, store: Store) -> None:
    await store.team("search", "gold", concurrent=3)
    await store.team("batch", "bronze")
    await store.holder.reload()
    greeting = fake_engine.hello(constants=CONSTANTS, max_queued_requests=11)
    async with client_of(replace(state, hello=lambda: greeting)) as client:
        search = (await client.get(f"{V1}/teams/search")).json()
        assert pause_of(search) == (bound(1, 2), bound(1, 0), 3, None)
        tiers = {tier["name"]: pause_of(tier) for tier in (await client.get(f"{V1}/tiers")).json()["data"]}
        assert tiers["gold"] == pause_of(search)
        assert tiers["bronze"] == (bound(2, 10), bound(2, 0), 11, None)
        assert tiers["silver"] == (None, None, None, "no team has this tier")
        assert pause_of((await client.get(f"{V1}/tiers/gold")).json()) == tiers["gold"]
        # the longest of a tier's teams, and by the table of teams as it is after the change
        made = (await client.post(f"{V1}/teams", json={"name": "more", "tier": "gold"})).json()
        assert made["max_pause_queue"] == 11
        assert pause_of((await client.get(f"{V1}/tiers/gold")).json()) == pause_of(made)
        await client.put(f"{V1}/teams/more/quota", json={"concurrent": 50})
        assert pause_of((await client.get(f"{V1}/teams/more")).json()) == pause_of(made), "the engine takes in 11"
        changed = (await client.patch(f"{V1}/tiers/gold", json={"starving_after_ms": 9000})).json()
        assert changed["max_pause_seconds"] == pytest.approx(made["max_pause_seconds"] + 8.7)
        archived = (await client.patch(f"{V1}/teams/more", json={"archived": True})).json()
        assert pause_of(archived) == (None, None, None, "the team is archived")
        none_kept = (await client.patch(f"{V1}/tiers/gold", json={"promotion_burst_grants": 0})).json()
        assert none_kept["max_pause_seconds"] is None
        assert "promotion_burst_grants is 0" in none_kept["max_pause_unknown"]


@pytest.mark.case("U05")
async def test_a_change_says_whose_maximum_pause_it_moves(state: AdminState, store: Store) -> None:
    """A new team takes part of everybody's share: also the bound of teams that nobody has touched moves."""
    await store.team("search", "gold")
    await store.team("batch", "bronze")
    await store.holder.reload()
    greeting = fake_engine.hello(constants=CONSTANTS)
    async with client_of(replace(state, hello=lambda: greeting)) as client:

        async def bounds() -> dict[str, float | None]:
            tiers = (await client.get(f"{V1}/tiers")).json()["data"]
            return {tier["name"]: tier["max_pause_empty_queue_seconds"] for tier in tiers}

        before = await bounds()
        made = (await client.post(f"{V1}/teams", json={"name": "more", "tier": "gold"})).json()
        after = await bounds()
        moves = [{"tier": name, "from_seconds": before[name], "to_seconds": after[name]} for name in ("bronze", "gold")]
        assert made["max_pause_moves"] == moves
        assert all(move["to_seconds"] > move["from_seconds"] for move in moves)
        first = (await client.post(f"{V1}/teams", json={"name": "chat", "tier": "silver"})).json()
        assert [move["tier"] for move in first["max_pause_moves"]] == ["bronze", "gold"], "nobody was silver before"
        same = (await client.patch(f"{V1}/tiers/gold", json={"max_queue_seconds": 9})).json()
        assert same["max_pause_moves"] == []
        none = (await client.patch(f"{V1}/tiers/bronze", json={"promotion_burst_grants": 0})).json()
        assert {move["tier"]: move["to_seconds"] for move in none["max_pause_moves"]}["bronze"] is None
        back = (await client.patch(f"{V1}/teams/more", json={"archived": True})).json()
        assert {move["tier"] for move in back["max_pause_moves"]} >= {"gold", "silver"}


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (None, "no engine is connected"),
        (fake_engine.hello(policy="fcfs"), "the policy fcfs bounds no pause"),
        (
            fake_engine.hello(constants=msgspec.structs.replace(CONSTANTS, promotion_percent=0)),
            "promotion is off: engine.promotion_percent is 0",
        ),
    ],
)
async def test_without_a_bound_the_reason_is_shown(state: AdminState, store: Store, greeting: Any, reason: str) -> None:
    await store.team("search", "gold")
    await store.holder.reload()
    async with client_of(replace(state, hello=lambda: greeting)) as client:
        for path in ("teams/search", "tiers/gold"):
            record = (await client.get(f"{V1}/{path}")).json()
            assert pause_of(record)[:2] == (None, None)
            assert record["max_pause_unknown"] == reason


async def test_maximum_pauses_are_worked_out_once_for_each_kind(
    state: AdminState, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        await store.team(f"team-{number}", ("gold", "silver", "bronze")[number % 3], concurrent=5 + number % 2)
    await store.holder.reload()
    calls = []

    def counted(*args: Any, **more: Any) -> int:
        calls.append(args)
        return pause_bound_us(*args, **more)

    monkeypatch.setattr(pauses, "pause_bound_us", counted)
    greeting = fake_engine.hello(constants=CONSTANTS)
    async with client_of(replace(state, hello=lambda: greeting)) as client:
        listed = (await client.get(f"{V1}/teams")).json()["data"]
    assert len(listed) == 30 and all(team["max_pause_seconds"] for team in listed)
    assert len(calls) == 3 * 2 * 2, "three tiers, two queues, full and empty"
