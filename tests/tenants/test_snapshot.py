"""Who a key stands for, as admission sees it."""

import hmac
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tenants import key_format, keys, teams, tiers
from tenants.clock import epoch_us, from_epoch_us
from tenants.errors import InvalidKey, KeyExpired, KeyRevoked, StoreUnavailable, TeamArchived
from tenants.pepper import Pepper
from tenants.quotas import Limits
from tenants.snapshot import Snapshot, SnapshotHolder
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio
NOW = from_epoch_us(NOW_US)


async def test_a_key_stands_for_its_team_on_its_terms(store: Store) -> None:
    team_id = await store.team("search", "silver", requests_per_minute=5)
    public_id, text = await store.key("search")
    snapshot = await store.holder.reload()
    who = snapshot.identify(text, NOW)
    assert (who.team, who.team_id, who.project, who.key_public_id) == ("search", team_id, "default", public_id)
    assert (who.tier.name, who.tier.weight) == ("silver", 2)
    assert who.limits == Limits(requests_per_minute=5)


@pytest.mark.case("S11")
async def test_unknown_and_wrong_keys_are_told_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.team("search")
    public_id, _ = await store.key("search")
    snapshot = await store.holder.reload()
    compared: list[tuple[int, int]] = []
    really = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return really(a, b)

    stranger = key_format.new_key()
    wrong = key_format.ParsedKey(public_id, stranger.secret)
    told = []
    for key in (stranger, wrong):
        text = key_format.render(key)
        monkeypatch.setattr("tenants.snapshot.hmac.compare_digest", compare)
        with pytest.raises(InvalidKey) as caught:
            snapshot.identify(text, NOW)
        monkeypatch.undo()
        told.append((caught.value.code, caught.value.message))
    assert told[0] == told[1]
    assert [sizes for sizes in compared if sizes == (32, 32)] == [(32, 32), (32, 32)]


@pytest.mark.case("S09")
async def test_keys_that_share_a_long_beginning_are_told_apart(store: Store) -> None:
    await store.team("one")
    await store.team("two")
    _, text = await store.key("one")
    one = key_format.parse(text)
    assert one is not None
    await store.key("two")
    snapshot = await store.holder.reload()
    # the same public id and the same first 40 characters of the secret
    near = key_format.ParsedKey(one.public_id, one.secret[:40] + one.secret[40:].swapcase()[::-1])
    assert near != one
    with pytest.raises(InvalidKey):
        snapshot.identify(key_format.render(near), NOW)
    assert snapshot.identify(text, NOW).team == "one"


@pytest.mark.case("G51", "B17")
async def test_a_revoked_key_is_refused_and_named_only_to_its_owner(store: Store) -> None:
    await store.team("search")
    public_id, text = await store.key("search")
    _, other = await store.key("search")
    running = (await store.holder.reload()).identify(text, NOW)
    async with store.database.begin_immediate() as connection:
        await keys.revoke_key(connection, public_id, at_us=NOW_US, actor="test")
    await store.holder.reload()
    with pytest.raises(KeyRevoked, match=public_id):
        store.holder.current.identify(text, NOW)
    forged = key_format.render(key_format.ParsedKey(public_id, "x" * 43))
    with pytest.raises(InvalidKey):
        store.holder.current.identify(forged, NOW)
    assert store.holder.current.identify(other, NOW).team == running.team == "search"


@pytest.mark.case("B17", "B12")
async def test_a_key_is_good_strictly_before_its_end_in_any_time_zone(store: Store) -> None:
    await store.team("search")
    end = NOW + timedelta(hours=1)
    _, text = await store.key("search", expires_at_us=epoch_us(end))
    snapshot = await store.holder.reload()
    tokyo = timezone(timedelta(hours=9))
    snapshot.identify(text, end - timedelta(microseconds=1))
    for at in (end, end.astimezone(tokyo), end + timedelta(days=1)):
        with pytest.raises(KeyExpired):
            snapshot.identify(text, at)
    snapshot.identify(text, (end - timedelta(microseconds=1)).astimezone(tokyo))


@pytest.mark.case("U08")
async def test_an_archived_team_has_no_terms_and_no_good_keys(store: Store) -> None:
    await store.team("search")
    kept = await store.team("batch", "bronze")
    public_id, text = await store.key("search")
    async with store.database.begin_immediate() as connection:
        await teams.update_team(connection, "search", is_archived=True, at_us=NOW_US, actor="test")
    snapshot = await store.holder.reload()
    assert [terms.team_id for terms in snapshot.team_terms()] == [kept]
    with pytest.raises(TeamArchived, match=r"Team search is archived.* terazi team set search --restore") as caught:
        snapshot.identify(text, NOW)
    assert caught.value.code == "team_archived"
    async with store.database.begin_immediate() as connection:
        await keys.revoke_key(connection, public_id, at_us=NOW_US, actor="test")
    with pytest.raises(KeyRevoked, match="has been revoked"):
        (await store.holder.reload()).identify(text, NOW)


@pytest.mark.case("U08")
async def test_when_a_team_is_restored_then_its_keys_open_again(store: Store) -> None:
    await store.team("search")
    _, text = await store.key("search")
    for is_archived in (True, False):
        async with store.database.begin_immediate() as connection:
            await teams.update_team(connection, "search", is_archived=is_archived, at_us=NOW_US, actor="test")
    assert (await store.holder.reload()).identify(text, NOW).team == "search"


async def test_terms_follow_the_tier(store: Store) -> None:
    await store.team("search")
    seen: list[Snapshot] = []
    store.holder.subscribe(seen.append)

    async def later(snapshot: Snapshot) -> None:
        seen.append(snapshot)

    store.holder.subscribe(later)
    await store.holder.reload()
    async with store.database.begin_immediate() as connection:
        await tiers.update_tier(connection, "gold", {"weight": 9}, at_us=NOW_US, actor="test")
    await store.holder.reload()
    assert [snapshot.team_terms()[0].weight for snapshot in seen] == [4, 4, 9, 9]
    assert seen[-1].team_terms()[0].starving_after_us == 300_000


@pytest.mark.case("G45")
async def test_with_the_database_gone_good_keys_stay_good_and_bad_ones_bad(store: Store) -> None:
    await store.team("search")
    _, text = await store.key("search")
    await store.holder.reload()
    await store.database.dispose()
    store.directory.rename(store.directory.with_name("gone"))
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.holder.reload()
    assert store.holder.num_failed_reloads == 2
    assert store.holder.current.identify(text, NOW).team == "search"
    with pytest.raises(InvalidKey):
        store.holder.current.identify(key_format.render(key_format.new_key()), NOW)


async def test_keys_of_another_pepper_are_left_out_and_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    await store.team("search")
    _, text = await store.key("search")
    stranger = SnapshotHolder(store.database, Pepper.of(b"another pepper, 32 bytes or more"))
    snapshot = await stranger.reload()
    with pytest.raises(InvalidKey):
        snapshot.identify(text, NOW)
    assert "1 API keys were made with another pepper" in caplog.text


async def test_before_the_first_reload_nobody_is_known(store: Store) -> None:
    assert store.holder.current.team_terms() == ()
    with pytest.raises(InvalidKey):
        store.holder.current.identify(key_format.render(key_format.new_key()), datetime.now(UTC))
