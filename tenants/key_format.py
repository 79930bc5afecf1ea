"""API keys as text and as hashes. Pure, except that `new_key` draws random characters.

    trz-<12 public>-<43 secret><6 checksum>        letters and digits only between the dashes

The public id names the key in tables, logs and errors.

The secret has 43 base-62 characters (256 bits), so a fast keyed hash is enough. The database stores HMAC-SHA256(pepper,
secret); the pepper is kept outside the database. A caller cannot choose a key, because a fast hash of a secret that can
be guessed would be worthless.

The checksum is CRC-32 in base 62, as in other vendors' keys. By it a scanner tells a key from a look-alike, and we
refuse a typo before any look-up.
"""

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass

PREFIX = "trz"
PUBLIC_LEN = 12
SECRET_LEN = 43
CHECKSUM_LEN = 6
ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase

# Published in the documentation, for secret scanners.
KEY_PATTERN = rf"{PREFIX}-[0-9A-Za-z]{{{PUBLIC_LEN}}}-[0-9A-Za-z]{{{SECRET_LEN + CHECKSUM_LEN}}}"
_KEY = re.compile(
    rf"{PREFIX}-(?P<public>[0-9A-Za-z]{{{PUBLIC_LEN}}})"
    rf"-(?P<secret>[0-9A-Za-z]{{{SECRET_LEN}}})(?P<checksum>[0-9A-Za-z]{{{CHECKSUM_LEN}}})",
    re.ASCII,
)
_ANY_KEY = re.compile(rf"(?P<id>{PREFIX}-[0-9A-Za-z]{{{PUBLIC_LEN}}})-[0-9A-Za-z]+")
KEY_LEN = len(PREFIX) + 1 + PUBLIC_LEN + 1 + SECRET_LEN + CHECKSUM_LEN


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key. The secret stays out of `repr`."""

    public_id: str
    secret: str

    def __repr__(self) -> str:
        return f"ParsedKey(public_id={self.public_id!r})"


def _draw(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def checksum(public_id: str, secret: str) -> str:
    """The checksum of the two parts: their CRC-32 as six base-62 digits."""
    value = zlib.crc32(f"{PREFIX}-{public_id}-{secret}".encode("ascii"))
    digits = ""
    for _ in range(CHECKSUM_LEN):
        value, digit = divmod(value, len(ALPHABET))
        digits = ALPHABET[digit] + digits
    return digits


def new_key() -> ParsedKey:
    """A fresh random key."""
    return ParsedKey(public_id=_draw(PUBLIC_LEN), secret=_draw(SECRET_LEN))


def render(key: ParsedKey) -> str:
    """The key as its owner sees it, once."""
    return f"{PREFIX}-{key.public_id}-{key.secret}{checksum(key.public_id, key.secret)}"


def parse(text: str) -> ParsedKey | None:
    """The parts of a well-formed key; None for any other text.

    Checks the length first, so a long text costs nothing.
    """
    if len(text) != KEY_LEN:
        return None
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    public_id, secret = match["public"], match["secret"]
    if not hmac.compare_digest(match["checksum"], checksum(public_id, secret)):
        return None
    return ParsedKey(public_id=public_id, secret=secret)


def redact(text: str) -> str:
    """`text` with the secret part of every key replaced by `***`, for messages that repeat what a caller sent."""
    return _ANY_KEY.sub(r"\g<id>-***", text)


def hash_secret(pepper: bytes, secret: str) -> bytes:
    """HMAC-SHA256(pepper, secret), 32 bytes: what the database keeps of a key. No call accepts or shows it."""
    return hmac.new(pepper, secret.encode("ascii"), hashlib.sha256).digest()
