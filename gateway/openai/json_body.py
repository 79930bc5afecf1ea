"""JSON bodies as clients send them: a byte order mark, other encodings, whole numbers written as fractions. Pure.

JSON is UTF-8 (RFC 8259 §8.1) and has one type of number. In some clients' languages all numbers are floats, so 8.0 is
taken as 8. A float so large that it may not be exact is refused, because nobody can know which number was meant.
"""

import codecs
from typing import Any

import msgspec

from gateway.errors import BadRequest

FLOAT_EXACT_MAX = 2**53 - 1  # the largest whole number to which no other whole number is rounded
_SEND_UTF8 = "Send it as UTF-8, with the header 'Content-Type: application/json; charset=utf-8'."
# The longer marks first: UTF-32's little-endian mark begins with UTF-16's.
_FOREIGN_STARTS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
    # Without a mark: a JSON text begins with an ASCII character, so the zero bytes around it tell the encoding.
    (b"{\0\0\0", "UTF-32"),
    (b"\0\0\0{", "UTF-32"),
    (b"{\0", "UTF-16"),
    (b"\0{", "UTF-16"),
)


def without_mark(body: bytes) -> bytes:
    """The body without a byte order mark at its start, which some editors and shells write."""
    return body.removeprefix(codecs.BOM_UTF8)


def not_json(body: bytes, reason: Exception) -> BadRequest:
    """The error for a body that is not JSON.

    It names the encoding if that is not UTF-8, else it has the decoder's words.
    """
    for start, encoding in _FOREIGN_STARTS:
        if body.startswith(start):
            return BadRequest(f"The request body is {encoding}. {_SEND_UTF8}", code="invalid_encoding")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return BadRequest(
            f"The request body is not UTF-8: it has the byte 0x{body[error.start]:02X} at position {error.start}. "
            f"{_SEND_UTF8}",
            code="invalid_encoding",
        )
    return BadRequest(f"The request body is not valid JSON: {reason}.", code="invalid_json")


class _Name:
    """A field's name. It is a type of its own, so that the decoder calls our hook at each name."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def fields_of(document: bytes | msgspec.Raw, fields_max: int) -> dict[str, msgspec.Raw]:
    """An object's fields, with their values as sent. Of a doubled name the last value counts. Copies no value.

    Raises BadRequest above `fields_max` fields, before it holds more, and msgspec.DecodeError when the text is no
    object.
    """
    num_fields = 0

    def count(_: Any, text: str) -> _Name:
        nonlocal num_fields
        num_fields += 1
        if num_fields > fields_max:
            raise ValueError
        return _Name(text)

    try:
        found = msgspec.json.decode(document, type=dict[_Name, msgspec.Raw], dec_hook=count)
    except msgspec.ValidationError:
        if num_fields > fields_max:
            raise BadRequest(f"The request has more than {fields_max} fields.", code="too_many_fields") from None
        raise
    return {name.text: value for name, value in found.items()}


def whole(param: str, value: int | float) -> int:
    """`value` as a whole number: 8 for 8.0.

    Raises BadRequest, with `param`, for a fraction such as 8.5, and for a float above FLOAT_EXACT_MAX.
    """
    if isinstance(value, int):
        return value
    if not value.is_integer():
        raise BadRequest(f"'{param}' must be a whole number, not {value}.", param=param, code="invalid_type")
    if abs(value) > FLOAT_EXACT_MAX:
        raise BadRequest(
            f"'{param}' is too large for a number with a fraction or an exponent; write all of its digits.",
            param=param,
            code="invalid_value",
        )
    return int(value)


def whole_or_none(param: str, value: int | float | None) -> int | None:
    """Like `whole`, but None stays None."""
    return None if value is None else whole(param, value)
