"""Token ids to text, incrementally: a token-to-bytes table, a UTF-8 decoder, then the stop matcher.

A character is released as soon as its last byte has arrived. A replacement character stands only for bytes that can no
longer become a character. So a stream and a single answer have the same text, however the tokens were grouped.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gateway.text.stop import StopMatcher

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table of printable characters that stand for bytes (openai/gpt-2 `encoder.py`): character to byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(256 + index): byte for index, byte in enumerate(list(others))})
    return table


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    """Whether the tokenizer is ByteLevel, by its decoder or its pre-tokenizer. If not, it is like sentencepiece."""
    decoder = document.get("decoder") or {}
    parts = [decoder, *decoder.get("decoders", [])]
    if any(part.get("type") == "ByteLevel" for part in parts):
        return True
    before = document.get("pre_tokenizer") or {}
    return any(part.get("type") == "ByteLevel" for part in [before, *before.get("pretokenizers", [])])


def token_bytes_table(tokenizer_json: str, *, silent_ids: Collection[int] = (), vocab_size: int = 0) -> list[bytes]:
    """The bytes of every token, by token id, from the text of a tokenizer.json.

    Three kinds of ids have no bytes: special tokens, `silent_ids` (the model's end tokens), and unused ids below
    `vocab_size`. Raises ValueError when the document has no vocabulary.
    """
    document = json.loads(tokenizer_json)
    vocabulary = (document.get("model") or {}).get("vocab")
    if not vocabulary:
        raise ValueError("tokenizer.json has no vocabulary")
    if isinstance(vocabulary, list):  # Unigram: [[token, score], ...]
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    added: list[dict[str, Any]] = document.get("added_tokens") or []
    size = max(vocab_size, 1 + max([*vocabulary.values(), *(token["id"] for token in added)]))
    table = [b""] * size
    alphabet = byte_alphabet() if _is_byte_level(document) else None
    for token, token_id in vocabulary.items():
        table[token_id] = _token_bytes(token, alphabet)
    for entry in added:
        table[entry["id"]] = b"" if entry.get("special") else entry["content"].encode()
    for token_id in silent_ids:
        if 0 <= token_id < size:
            table[token_id] = b""
    return table


def _token_bytes(token: str, alphabet: Mapping[str, int] | None) -> bytes:
    if alphabet is not None:
        mapped = [alphabet.get(char) for char in token]
        if any(byte is None for byte in mapped):  # a token outside the byte alphabet stands for itself
            return token.encode()
        return bytes(byte for byte in mapped if byte is not None)
    match = _BYTE_TOKEN.match(token)
    if match:
        return bytes([int(match.group(1), 16)])
    return token.replace("▁", " ").encode()


class Detokenizer:
    """One request's text. Takes token ids, returns text that no later token can change, and ends at a stop string."""

    def __init__(self, table: list[bytes], stops: Iterable[str] = (), *, min_tokens: int = 0) -> None:
        """`table` has the bytes of each token id.

        Stop strings are looked for only behind the first `min_tokens` tokens.
        """
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete. All later text is then dropped."""
        return self._matcher.matched

    def feed(self, token_ids: Iterable[int]) -> str:
        """Take in new tokens and return the text that has become certain. An id outside the table adds no text."""
        pieces = []
        for token_id in token_ids:
            if self._matcher.matched:
                break
            self._num_tokens += 1
            data = self._table[token_id] if 0 <= token_id < len(self._table) else b""
            text = self._decoder.decode(data)
            if text:
                pieces.append(text if self._num_tokens <= self._min_tokens else self._matcher.feed(text))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest of the text, at the end of the output. An unfinished character becomes one U+FFFD."""
        if self._matcher.matched:
            return ""
        return self._matcher.feed(self._decoder.decode(b"", final=True)) + self._matcher.flush()
