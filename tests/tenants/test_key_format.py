"""The text of an API key, and its hash."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants import key_format


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
