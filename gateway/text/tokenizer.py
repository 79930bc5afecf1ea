"""Text to token ids for one model build: raw prompts, and chats through the model's own template.

Text that a caller writes inside a message can never become a control token. Special tokens are recognised only in the
text that the template itself wrote, in four steps:

1. Inside the messages, each spelling of a special token is replaced by a mark.
2. The template is rendered, and the text is cut at the special tokens that remain: those are the template's own.
3. In the pieces between, each mark is replaced by the spelling it stands for.
4. The pieces are encoded with special tokens switched off.

A raw prompt of /v1/completions is wholly the caller's, so special tokens are recognised in it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.wire.messages import ModelInfo
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.text.chat_template import ChatTemplate, load_chat_template
from gateway.text.detokenizer import token_bytes_table

# Settings in tokenizer.json that are left from training. If we obeyed them, they would silently cut or pad prompts.
_TRAINING_ONLY: dict[str, Any] = {"truncation": None, "padding": None}

# A mark is a number between two Unicode noncharacters, which are never part of exchanged text. A caller who sends a
# mark nevertheless gets the spelling that it stands for, as ordinary text.
_MARK = re.compile("\ufdd0([0-9]{1,6})\ufdd1")

# A text is encoded whole, for exactness, unless a prefix of it already has too many tokens. The first prefix has
# _PREFIX_CHARS characters for each token of room (English has about 4.5); each further prefix is _PREFIX_GROWTH times
# as long.
_PREFIX_CHARS, _PREFIX_GROWTH = 4, 4
_PREFIX_LEAST_CHARS = 4096
# Close to its cut, a prefix may have other words than the whole text: so many last words or characters do not count.
_CUT_WORDS, _CUT_CHARS = 4, 64


def _document(tokenizer_json: str) -> dict[str, Any]:
    """tokenizer.json without the settings for training: truncation, padding and dropout. Raises ValueError."""
    try:
        document = json.loads(tokenizer_json)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("tokenizer.json cannot be read: it must hold a JSON object")
    model = document.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        document["model"] = model | {"dropout": None}
    return document | _TRAINING_ONLY


def _tokenizer(document: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer of this document. Raises ValueError."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise ValueError(f"tokenizer.json cannot be read: {reason}") from error


def _begins_differently(pre_tokenizer: Any) -> bool:
    """Whether the pre-tokenizer puts a blank only in front of a text's beginning (Metaspace's scheme `first`)."""
    return '"prepend_scheme": "first"' in json.dumps(pre_tokenizer)


def _inside(pre_tokenizer: Any) -> Any:
    """The same pre-tokenizer, for a piece of text that is not at the beginning."""
    if isinstance(pre_tokenizer, dict):
        changed = {name: _inside(value) for name, value in pre_tokenizer.items()}
        return changed | ({"prepend_scheme": "never"} if changed.get("prepend_scheme") == "first" else {})
    return [_inside(part) for part in pre_tokenizer] if isinstance(pre_tokenizer, list) else pre_tokenizer


class ModelTokenizer:
    """Owns the tokenizer, the template and the token-to-bytes table of the model that is served. Thread-safe."""

    def __init__(
        self,
        tokenizer_json: str,
        template: ChatTemplate | None,
        *,
        vocab_size: int = 0,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`tokenizer_json` is the text of the file. Raises ValueError when the text is no tokenizer."""
        document = _document(tokenizer_json)
        self._full = _tokenizer(document)
        self._plain = _tokenizer(document)
        self._plain.encode_special_tokens = True
        # A piece behind a special token is not at the text's beginning, so it gets no blank that only a beginning gets.
        self._plain_inside = self._plain
        if _begins_differently(document.get("pre_tokenizer")):
            self._plain_inside = _tokenizer(document | {"pre_tokenizer": _inside(document["pre_tokenizer"])})
            self._plain_inside.encode_special_tokens = True
        specials = [token for token in document.get("added_tokens") or [] if token.get("special")]
        self._special_ids = {token["content"]: token["id"] for token in specials}
        self._strips_left = {token["content"] for token in specials if token.get("lstrip")}
        self._strips_right = {token["content"] for token in specials if token.get("rstrip")}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._spellings = [token["content"] for token in specials]
        self._marks = {content: f"\ufdd0{number}\ufdd1" for number, content in enumerate(self._spellings)}
        self._template = template
        self.table = token_bytes_table(tokenizer_json, silent_ids=eos_token_ids, vocab_size=vocab_size)
        self.vocab_size = vocab_size or len(self.table)
        # Without a normalizer, a token stands for at most its own bytes, so a prompt can be too long by its length
        # alone.
        longest = max((len(data) for data in self.table), default=0)
        longest = max([longest, *(len(content.encode()) for content in self._special_ids)])
        self._max_token_bytes = None if document.get("normalizer") else longest
        added = [len(token["content"]) for token in document.get("added_tokens") or []]
        self._cut_chars = max([_CUT_CHARS, *(2 * length for length in added)])

    @classmethod
    def load(cls, info: ModelInfo) -> "ModelTokenizer":
        """Read `tokenizer.json` and the template from the model's directory. Raises OSError or ValueError."""
        directory = Path(info.path)
        return cls(
            (directory / "tokenizer.json").read_text("utf-8"),
            load_chat_template(directory),
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template. Without a template no chat can be served."""
        return self._template is not None

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, room: int) -> list[int]:
        """The token ids of a conversation, up to the assistant's turn.

        Encoding stops early when there are more than `room` tokens, but a result may still be longer. Raises BadRequest
        when the model has no template or the template refuses the messages, and ContextLengthExceeded when encoding
        stopped early.
        """
        if self._template is None:
            raise BadRequest(
                "This model has no chat template; use /v1/completions.", param="messages", code="no_chat_template"
            )
        try:
            defused = [self._defuse(message) for message in messages]
        except RecursionError:
            raise BadRequest("The messages are nested too deeply.", param="messages", code="invalid_messages") from None
        text = self._template.render(defused)
        self._check_length(text, room, "messages")
        ids: list[int] = []
        for piece, special_id in self._split(text):
            if len(ids) > room:
                raise _too_many(room, "messages")
            if piece:
                plain = self._plain_inside if ids else self._plain
                spelled = _MARK.sub(self._spelling, piece)
                self._check_prefixes(plain, spelled, room, room - len(ids), "messages")
                ids += plain.encode(spelled, add_special_tokens=False).ids
            if special_id is not None:
                ids.append(special_id)
        return ids

    def encode_text(self, text: str, *, room: int) -> list[int]:
        """The token ids of a raw prompt. The tokenizer's BOS comes first, but never twice.

        Raises ContextLengthExceeded when there are certainly more than `room` tokens; a result may still be longer.
        """
        self._check_length(text, room, "prompt")
        self._check_prefixes(self._full, text, room, room, "prompt")
        ids: list[int] = self._full.encode(text, add_special_tokens=True).ids
        if len(ids) > 1 and ids[0] == ids[1] and ids[0] in self._special_ids.values():
            bare = self._full.encode(text, add_special_tokens=False).ids
            if ids[1:] == bare:  # the text began with a BOS, and the tokenizer put a second BOS in front
                return bare
        return ids

    def _check_length(self, text: str, room: int, param: str) -> None:
        if self._max_token_bytes and len(text) > room * self._max_token_bytes:
            raise ContextLengthExceeded(
                f"The prompt has {len(text)} characters, which is more than {room} tokens can hold.", param=param
            )

    def _check_prefixes(self, tokenizer: tokenizers.Tokenizer, text: str, room: int, rest: int, param: str) -> None:
        """Raises ContextLengthExceeded when a prefix shows that `text` has more than `rest` tokens.

        The message names `room`, the room of the whole prompt.
        """
        num_chars = max(_PREFIX_CHARS * rest, _PREFIX_LEAST_CHARS)
        while num_chars < len(text):
            if self._certain_tokens(tokenizer, text[:num_chars]) > rest:
                raise _too_many(room, param)
            num_chars *= _PREFIX_GROWTH

    def _certain_tokens(self, tokenizer: tokenizers.Tokenizer, prefix: str) -> int:
        """The least number of tokens that a text beginning with `prefix` can have.

        A word is what the tokenizer's first cut makes of a text, and no token reaches over the border of two words.
        Words are found from left to right. So the words well before the end of `prefix` are words of the whole text
        too, and their tokens count. With a tokenizer that does not cut texts into words, the prefix is one word, and
        the result is 0.
        """
        encoding = tokenizer.encode(prefix, add_special_tokens=False)
        words, offsets = encoding.word_ids, encoding.offsets
        last_word = next((word for word in reversed(words) if word is not None), 0)
        last_char = len(prefix) - self._cut_chars
        count = len(words)
        while count and ((words[count - 1] or 0) > last_word - _CUT_WORDS or offsets[count - 1][1] > last_char):
            count -= 1
        return count

    def _defuse(self, value: Any) -> Any:
        """`value` with every special token's spelling replaced by its mark, in strings at any depth."""
        if isinstance(value, str):
            if self._special is None:
                return value
            return self._special.sub(lambda match: self._marks[match.group()], value)
        if isinstance(value, dict):
            return {self._defuse(key): self._defuse(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._defuse(item) for item in value]
        return value

    def _spelling(self, mark: re.Match[str]) -> str:
        number = int(mark.group(1))
        return self._spellings[number] if number < len(self._spellings) else mark.group()

    def _split(self, text: str) -> list[tuple[str, int | None]]:
        """`text` as pieces of ordinary text, each with the id of the special token behind it; the last piece has
        None."""
        if self._special is None:
            return [(text, None)]
        pieces: list[tuple[str, int | None]] = []
        begin = 0
        strip_next = False
        for match in self._special.finditer(text):
            token = match.group()
            piece = text[begin : match.start()]
            piece = piece.lstrip() if strip_next else piece
            pieces.append((piece.rstrip() if token in self._strips_left else piece, self._special_ids[token]))
            strip_next = token in self._strips_right
            begin = match.end()
        rest = text[begin:]
        pieces.append((rest.lstrip() if strip_next else rest, None))
        return pieces


def _too_many(room: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(f"The prompt has more than {room} tokens.", param=param)
