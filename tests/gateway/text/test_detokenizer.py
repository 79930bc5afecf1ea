"""Token ids to text: complete characters at once, no guesses, and the same text however tokens are grouped."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.detokenizer import Detokenizer, token_bytes_table
from tests.support.gateway.fake_engine import EOS, VOCAB_SIZE, byte_ids
from tests.support.gateway.harness import TOKENIZER

TABLE = TOKENIZER.table


def streamed(ids: list[int], stops: tuple[str, ...] = (), min_tokens: int = 0) -> list[str]:
    """Text released token by token, the flush last."""
    text = Detokenizer(TABLE, stops, min_tokens=min_tokens)
    return [*(text.feed([token_id]) for token_id in ids), text.flush()]


def whole(ids: list[int], stops: tuple[str, ...] = (), min_tokens: int = 0) -> str:
    text = Detokenizer(TABLE, stops, min_tokens=min_tokens)
    return text.feed(ids) + text.flush()


@pytest.mark.case("K52")
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_emoji_split_over_tokens_shows_no_replacement(cut: int) -> None:
    data = "😀".encode()
    table = [data[:cut], data[cut:], b"!"]
    text = Detokenizer(table)
    assert [text.feed([0]), text.feed([1]), text.feed([2])] == ["", "😀", "!"]


@pytest.mark.case("K52")
def test_when_a_character_is_cut_the_text_is_the_same_streamed() -> None:
    ids = byte_ids("ok 😀")[:-2]
    assert "".join(streamed(ids)) == whole(ids) == "ok \ufffd"


@pytest.mark.case("K54")
def test_invalid_bytes_and_absurd_ids_only_cost_their_own_text() -> None:
    table = [*TABLE, b"", b""]  # slots beyond the tokenizer
    text = Detokenizer(table)
    ids = [*byte_ids("a"), 3 + 0xFF, *byte_ids("b"), len(table) - 1, len(table) + 5, -1, 10**9, *byte_ids("c")]
    assert text.feed(ids) + text.flush() == "a\ufffdbc"


@given(st.binary(max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_any_bytes_in_any_grouping_decode_as_one_string(data: bytes, sizes: list[int]) -> None:
    ids = byte_ids(data)
    text, released, at = Detokenizer(TABLE), [], 0
    for size in [*sizes, len(ids)]:
        released.append(text.feed(ids[at : at + size]))
        at += size
    assert "".join([*released, text.flush()]) == data.decode("utf-8", "replace")


@given(st.text(max_size=12), st.lists(st.text("ab\n😀é", min_size=1, max_size=3), max_size=3))
def test_stream_and_single_answer_agree_with_stop_strings(text: str, stops: list[str]) -> None:
    ids = byte_ids(text)
    assert "".join(streamed(ids, tuple(stops))) == whole(ids, tuple(stops))


def test_every_complete_character_is_released_with_its_last_byte() -> None:
    assert streamed(byte_ids("é€a")) == ["", "é", "", "", "€", "a", ""]


def test_special_tokens_and_end_tokens_have_no_text() -> None:
    assert whole([0, 1, EOS, *byte_ids("x")]) == "x"


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = byte_ids("stop and stop")
    assert whole(ids, ("stop",)) == ""
    assert whole(ids, ("stop",), min_tokens=4) == "stop and "


@pytest.mark.case("T1")
def test_the_last_of_min_tokens_is_not_looked_at() -> None:
    """A stop of one letter, so that the one token at the edge could complete it."""
    assert whole(byte_ids("ab"), ("a",), min_tokens=1) == "".join(streamed(byte_ids("ab"), ("a",), 1)) == "ab"
    assert whole(byte_ids("ab"), ("b",), min_tokens=1) == "a", "the first token after them is"
    assert whole(byte_ids("ab"), ("ab",), min_tokens=1) == "ab", "nor is a stop string that begins in them"


def test_the_table_spells_what_the_tokenizer_spells() -> None:
    text = "the scales weigh what each team was given, naïve 😀\tend"
    ids = TOKENIZER.encode_text(text, room=2048)
    assert len(ids) < len(text.encode()), "merges were used"
    assert b"".join(TABLE[token_id] for token_id in ids).decode() == text


def test_sentencepiece_tokens_with_byte_fallback() -> None:
    document = {
        "model": {"type": "BPE", "vocab": {"<unk>": 0, "▁the": 1, "<0xC3>": 2, "<0xA9>": 3}},
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True},
            {"id": 4, "content": "<think>", "special": False},
        ],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
    }
    table = token_bytes_table(json.dumps(document), vocab_size=6)
    assert table == [b"", b" the", b"\xc3", b"\xa9", b"<think>", b""]


def test_unigram_vocabularies_are_lists() -> None:
    document = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.0]]}, "added_tokens": []}
    assert token_bytes_table(json.dumps(document)) == [b"<unk>", b" a"]


def test_a_document_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="no vocabulary"):
        token_bytes_table("{}")


def test_the_table_covers_the_whole_vocabulary() -> None:
    assert len(TABLE) == VOCAB_SIZE
