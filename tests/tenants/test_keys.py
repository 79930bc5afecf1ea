"""API keys: their text, their hash, their pepper, their rows."""

import base64
import json
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants import audit, key_format, keys, tables
from tenants.errors import Conflict, Invalid, NotFound
from tenants.pepper import PEPPER_ENV, Pepper, load_pepper
from tests.support.tenants.stores import NOW_US, Store


def test_a_key_reads_back_and_matches_the_published_pattern() -> None:
    key = key_format.new_key()
    text = key_format.render(key)
    assert re.fullmatch(key_format.KEY_PATTERN, text)
    assert len(text) == key_format.KEY_LEN
    assert key_format.parse(text) == key
    assert key.secret not in repr(key)


def test_two_keys_differ_in_both_parts() -> None:
    drawn = [key_format.new_key() for _ in range(200)]
    assert len({key.public_id for key in drawn}) == len({key.secret for key in drawn}) == 200


@pytest.mark.case("S02")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "undefined",
        "' OR 1=1 --",
        "trz-aaaaaaaaaaaa-" + "a" * 48 + "'",
        "trz-aaaaaaaaaaa%-" + "a" * 49,
        "trz-aaaaaaaaaaaa-" + "é" * 49,
        "trz-aaaaaaaaaaaa-" + "٣" * 49,
        "sk-" + "a" * 63,
        "a" * 1_000_000,
    ],
)
def test_what_is_not_a_key_is_refused_by_its_form(text: str) -> None:
    assert key_format.parse(text) is None


@given(st.integers(0, key_format.KEY_LEN - 1), st.sampled_from(key_format.ALPHABET))
def test_any_one_changed_character_fails_the_checksum(at: int, other: str) -> None:
    text = key_format.render(key_format.ParsedKey("Ab3dEf6hIj9l", "s" * 43))
    if text[at] != other:
        assert key_format.parse(text[:at] + other + text[at + 1 :]) is None


@pytest.mark.case("S10")
def test_the_stored_hash_depends_on_the_pepper_and_is_no_key() -> None:
    one = key_format.hash_secret(b"p" * 32, "s" * 43)
    assert one != key_format.hash_secret(b"q" * 32, "s" * 43)
    assert len(one) == 32
    assert key_format.parse(one.hex()) is None


def test_the_pepper_is_made_once_with_mode_0600(tmp_path: Path) -> None:
    first = load_pepper(tmp_path, {})
    assert stat.S_IMODE((tmp_path / "pepper").stat().st_mode) == 0o600
    assert load_pepper(tmp_path, {}) == first
    assert os.listdir(tmp_path) == ["pepper"]  # no draft is left
    assert base64.b64encode(first.secret).decode() not in repr(first)


def test_a_pepper_of_the_environment_wins_and_makes_no_file(tmp_path: Path) -> None:
    text = base64.b64encode(b"e" * 32).decode()
    assert load_pepper(tmp_path, {PEPPER_ENV: text}) == Pepper.of(b"e" * 32)
    assert not (tmp_path / "pepper").exists()


@pytest.mark.parametrize("text", ["", "short", base64.b64encode(b"x" * 31).decode(), "é" * 50])
def test_a_damaged_pepper_stops_the_start_and_is_not_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "pepper").write_text(text)
    with pytest.raises(Invalid, match="damaged"):
        load_pepper(tmp_path, {})
    assert (tmp_path / "pepper").read_text() == text


@pytest.mark.anyio
@pytest.mark.case("G52", "S10")
async def test_the_secret_is_nowhere_in_the_store(store: Store) -> None:
    await store.team("search")
    public_id, text = await store.key("search")
    secret = key_format.parse(text).secret  # type: ignore[union-attr]
    async with store.database.begin_immediate() as connection:
        await keys.revoke_key(connection, public_id, at_us=store.now_us, actor="test")
        shown = await keys.list_keys(connection)
        trail = await audit.latest(connection)
        held = {table.name: (await connection.execute(table.select())).all() for table in tables.metadata.sorted_tables}
    await store.database.dispose()
    everything = b"".join(path.read_bytes() for path in store.directory.iterdir())
    for told in (repr(shown), json.dumps(trail), repr(held), repr(store.holder.current)):
        assert secret not in told
    assert public_id in json.dumps(trail)
    assert secret.encode() not in everything
    assert public_id.encode() in everything  # the search would find it


@pytest.mark.anyio
async def test_a_revoke_is_for_good_and_may_be_repeated(store: Store) -> None:
    await store.team("search")
    public_id, _ = await store.key("search")
    async with store.database.begin_immediate() as connection:
        first = await keys.revoke_key(connection, public_id, at_us=NOW_US + 1, actor="test")
        again = await keys.revoke_key(connection, public_id, at_us=NOW_US + 2, actor="test")
    assert first.revoked_at_us == again.revoked_at_us == NOW_US + 1


@pytest.mark.anyio
async def test_a_key_needs_a_living_team_and_a_future(store: Store) -> None:
    from tenants import teams

    await store.team("search")
    with pytest.raises(NotFound):
        await store.key("nobody")
    with pytest.raises(Invalid, match="future"):
        await store.key("search", expires_at_us=NOW_US)
    async with store.database.begin_immediate() as connection:
        await teams.update_team(connection, "search", is_archived=True, at_us=NOW_US, actor="test")
    with pytest.raises(Conflict, match="archived"):
        await store.key("search")


@pytest.mark.anyio
@pytest.mark.case("S02")
@pytest.mark.parametrize("given_id", ["", "%", "x' OR '1'='1", "A" * 12, "A" * 5000])
async def test_a_look_up_by_anything_but_a_public_id_finds_nothing(store: Store, given_id: str) -> None:
    await store.team("search")
    await store.key("search")
    async with store.database.session() as connection:
        with pytest.raises(NotFound):
            await keys.get_key(connection, given_id)


@pytest.mark.anyio
@pytest.mark.case("S08")
async def test_a_team_sees_only_its_own_keys(store: Store) -> None:
    for team in ("one", "two"):
        await store.team(team)
    own = {(await store.key("one"))[0] for _ in range(3)}
    other = {(await store.key("two"))[0] for _ in range(2)}
    async with store.database.session() as connection:
        assert {key.public_id for key in await keys.list_keys(connection, "one")} == own
        assert {key.public_id for key in await keys.list_keys(connection, "two")} == other
        assert len(await keys.list_keys(connection)) == 5
