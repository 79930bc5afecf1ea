"""Stop strings over decoded text: an Aho-Corasick automaton that is fed piece by piece and holds back little text.

Scope: all text that the model generates, reasoning included, from the first token on (or the first after `min_tokens`).
We match text and not token ids, because one stop string has many tokenisations.

Of the text fed so far, the matcher holds back only the longest suffix that may still become a stop string. So a stream
without such a suffix has no added latency. For example, with the stop string "END" and the text "an EN", it holds back
"EN". The stop string that ends first wins; of several that end together, the longest wins.

Source: A. Aho and M. Corasick, "Efficient string matching", CACM 18(6), 1975, algorithms 2 and 3.
"""

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Owns the automaton's state and the held-back text of one request."""

    def __init__(self, stops: Iterable[str]) -> None:
        """Build the automaton. Raises ValueError for an empty stop string, which would match before any text."""
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match_len = [0]  # longest stop that ends in this state
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty")
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.matched = False

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match_len.append(0)
            state = following
        self._match_len[state] = len(stop)

    def _link(self) -> None:
        """Set the failure links, breadth first. A state's link is its longest proper suffix that is a state too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                self._fail[following] = self._step(self._fail[state], char)
                queue.append(following)
            # A stop string that is a suffix of this state ends here too. A stop that is the whole state is longer, and
            # wins.
            if not self._match_len[state]:
                self._match_len[state] = self._match_len[self._fail[state]]

    def _step(self, state: int, char: str) -> int:
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def feed(self, text: str) -> str:
        """Take in more text and return the text that is certain now. Sets `matched` when a stop string is complete.

        The stop string and all text behind it are dropped, and after a match every call returns "".
        """
        if self.matched:
            return ""
        if len(self._next) == 1:
            return text
        state = self._state
        for position, char in enumerate(text):
            state = self._step(state, char)
            if self._match_len[state]:
                self.matched = True
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[: len(seen) - self._match_len[state]]
        self._state = state
        seen = self._held + text
        keep = len(seen) - self._depth[state]
        self._held = seen[keep:]
        return seen[:keep]

    def flush(self) -> str:
        """The text that is still held back.

        Call it at the end of the output, when no stop string can become complete.
        """
        held, self._held, self._state = self._held, "", 0
        return held
