"""Stop strings: matched over text, whatever the pieces; only a live prefix is ever held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop import StopMatcher


def feed_all(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What each piece released, the flush last."""
    matcher = StopMatcher(stops)
    released = [matcher.feed(piece) for piece in pieces]
    return [*released, "" if matcher.matched else matcher.flush()], matcher.matched


def reference(stops: list[str], text: str) -> str:
    """Cut at the earliest end of any stop; of several with that end, at the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, negative_len = min(ends)
    return text[: end + negative_len]


@pytest.mark.case("K48")
def test_a_stop_in_two_pieces_leaks_no_prefix() -> None:
    assert feed_all(["END"], ["E", "ND", "tail"]) == (["", "", "", ""], True)
    assert feed_all(["END"], ["E", "XIT"]) == (["", "EXIT", ""], False)


@pytest.mark.case("K51")
@pytest.mark.parametrize("pieces", [["a", "\n", "\n", "b"], ["a", ".\n\n", "b"], ["a\n", "\nb"], ["a\n\n"]])
def test_a_stop_matches_however_it_was_tokenised(pieces: list[str]) -> None:
    released, matched = feed_all(["\n\n"], pieces)
    assert matched
    assert "".join(released) == "".join(pieces).split("\n\n")[0]


def test_nothing_is_held_when_no_prefix_is_live() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.feed("a long text without any") == "a long text without any"
    assert matcher.feed(" < b") == " < b"
    assert matcher.feed("x <") == "x "  # the only live prefix
    assert matcher.flush() == "<"


def test_the_earliest_end_wins_and_ties_go_to_the_longest() -> None:
    assert feed_all(["cd", "abcdef"], ["abcdef"]) == (["ab", ""], True)
    assert feed_all(["cd", "bcd"], ["abcd"]) == (["a", ""], True)


def test_a_stop_inside_another_is_found_through_the_failure_link() -> None:
    assert feed_all(["abcd", "bc"], ["xabce"]) == (["xa", ""], True)


@pytest.mark.case("K50")
def test_the_scope_is_all_generated_text_also_the_thinking_part() -> None:
    released, matched = feed_all(["Question:"], ["<think>", "Quest", "ion: why?", "</think>", "42"])
    assert matched and "".join(released) == "<think>"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_the_released_text_equals_the_whole_text_cut_once(stops: list[str], pieces: list[str]) -> None:
    released, matched = feed_all(stops, pieces)
    text = "".join(pieces)
    assert "".join(released) == reference(stops, text)
    assert matched == any(stop in text for stop in stops)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", min_size=1, max_size=3), max_size=8),
)
def test_what_is_held_is_exactly_the_longest_live_prefix(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = released = ""
    for piece in pieces:
        seen += piece
        released += matcher.feed(piece)
        if matcher.matched:
            return
        held = len(seen) - len(released)
        live = max(
            (n for stop in stops for n in range(len(stop)) if n <= len(seen) and seen.endswith(stop[:n])), default=0
        )
        assert held == live
