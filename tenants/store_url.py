"""The URL of the store: which URLs are accepted, and how a URL is shown without its password.

Platforms hand out such URLs in several spellings, and people paste what a program prints into tickets. So `normalised`
turns any usual spelling into the spelling that SQLAlchemy's async drivers take, and `masked` hides every part of a URL
that could belong to a password. A text that is no clean URL is hidden whole, because nobody can tell where its password
ends.
"""

import re
from urllib.parse import parse_qsl, unquote, urlencode

from tenants.errors import Invalid

HIDDEN = "***"
POSTGRESQL, SQLITE = "postgresql+asyncpg", "sqlite+aiosqlite"
_SCHEMES = dict.fromkeys(("postgresql", "postgres", POSTGRESQL), POSTGRESQL) | dict.fromkeys(("sqlite", SQLITE), SQLITE)
_EXAMPLE = "postgresql://USER:PASSWORD@HOST:PORT/NAME"

# Read as SQLAlchemy reads a URL, where a password ends at the first @. Stricter behind it: another @ there may belong
# to the password, so `_parsed` refuses such a URL.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]*)://"
    r"(?:(?P<user>[^:/@?]*)(?P<password>:[^@]*)?@)?"
    r"(?P<host>\[[^\[\]/?@]*\]|[^:/?@\[\]]*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<database>/[^?]*)?"
    r"(?:\?(?P<query>.*))?",
    re.ASCII | re.DOTALL,
)
# Parameters in a query that are no secret. All others are hidden, since a driver may take a password by any name.
_SHOWN = frozenset({"host", "port", "user", "dbname", "database", "ssl", "sslmode", "timeout", "connect_timeout"})
_SHOWN |= {"command_timeout", "application_name", "statement_cache_size", "prepared_statement_cache_size"}
_SHOWN |= {"target_session_attrs", "uri", "mode"}
# Parameters that libpq's URLs name differently: libpq's name to asyncpg's.
_RENAMED = {"sslmode": "ssl", "connect_timeout": "timeout", "dbname": "database"}
NUMBERS = {"timeout": float, "command_timeout": float, "statement_cache_size": int}
NUMBERS |= {"max_cached_statement_lifetime": int, "max_cacheable_statement_size": int}
_TEXTS = ("host", "port", "user", "password", "passfile", "database", "ssl", "target_session_attrs", "krbsrvname")
_POSTGRESQL_QUERY = (*_TEXTS, *NUMBERS, "application_name", "prepared_statement_cache_size")


def normalised(text: str) -> str:
    """The URL in the spelling that the async drivers take.

    Raises Invalid. Its message holds nothing of `text` but the scheme and the names of parameters.
    """
    text = text.strip()
    found = _parsed(text)
    if found is None:
        raise Invalid(
            f"The store URL cannot be read; write {_EXAMPLE} or sqlite:////PATH. In a password, write @ as %40, "
            ": as %3A, / as %2F, ? as %3F, # as %23 and % as %25.",
            param="store.url",
        )
    scheme = _SCHEMES.get(found["scheme"].lower())
    if scheme is None:
        raise Invalid(
            f"The store URL begins with {found['scheme']}://; Terazi serves PostgreSQL as {POSTGRESQL}:// and SQLite "
            f"as {SQLITE}://.",
            param="store.url",
        )
    _check_port(found["port"])
    rest = text.partition("://")[2]
    if scheme == SQLITE or not found["query"]:
        return f"{scheme}://{rest}"
    return f"{scheme}://{rest.removesuffix(found['query'])}{_query(found['query'])}"


def masked(text: str) -> str:
    """The URL as it may be printed: without its password and unknown parameters.

    A text that is no clean URL is hidden.
    """
    text = text.strip()
    if not text:
        return text
    found = _parsed(text)
    if found is None:
        scheme, separator, _ = text.partition("://")
        is_scheme = bool(separator) and scheme.lower() in _SCHEMES
        return f"{scheme}://{HIDDEN}" if is_scheme else HIDDEN
    shown = found["scheme"] + "://"
    if found["user"] is not None:
        shown += found["user"] + (f":{HIDDEN}" if found["password"] else "") + "@"
    shown += found["host"] + (f":{found['port']}" if found["port"] else "") + (found["database"] or "")
    if found["query"] is not None:
        pairs = (pair.partition("=") for pair in found["query"].split("&"))
        shown += "?" + "&".join(f"{name}={value if name in _SHOWN else HIDDEN}" for name, _, value in pairs)
    return shown


def without_secrets(message: str, url: str) -> str:
    """A driver's message about `url`, in which every part that `masked` hides is hidden too."""
    found = _parsed(url.strip())
    if found is None:
        return HIDDEN if url.strip() and url.strip() in message else message
    secrets = {(found["password"] or "").removeprefix(":")}
    secrets |= {value for name, value in parse_qsl(found["query"] or "") if name not in _SHOWN}
    secrets |= {unquote(secret) for secret in secrets}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= 3:  # shorter texts occur in ordinary words
            message = message.replace(secret, HIDDEN)
    return message


_USER_INFO = re.compile(r"(\w://[^\s:/@'\"]*):(?!PASSWORD@)[^\s@'\"]+@")
_PARAMETER = re.compile(r"([?&;\s]password=)[^\s&;'\"]+", re.IGNORECASE)


def scrubbed(text: str) -> str:
    """`text`, such as a log line, with the passwords of all URLs in it hidden."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER_INFO.sub(rf"\1:{HIDDEN}@", text))


def _parsed(text: str) -> re.Match[str] | None:
    """The parts of a clean URL. None for a text whose password may not end where it seems to."""
    found = _URL.fullmatch(text)
    if found is None or not text.isprintable():
        return None
    after = (found["database"] or "") + (found["query"] or "")
    is_file = found["scheme"].lower().startswith("sqlite") and not (found["host"] or found["user"])
    if "@" in (found["query"] or "") if is_file else "@" in after:
        return None
    if found["query"] and not all(name and separator for name, separator, _ in _pairs(found["query"])):
        return None
    return found


def _pairs(query: str) -> list[tuple[str, str, str]]:
    return [pair.partition("=") for pair in query.split("&")]


def _query(query: str) -> str:
    """A query with libpq's names turned into asyncpg's. Raises Invalid for an unknown name or a wrong number."""
    pairs = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        known = _RENAMED.get(name, name)
        if known not in _POSTGRESQL_QUERY:
            names = ", ".join(_POSTGRESQL_QUERY)
            raise Invalid(f"The store URL has the parameter {name!r}; the driver takes {names}.", param="store.url")
        number = NUMBERS.get(known)
        try:
            if number is not None:
                number(value)
        except ValueError:
            raise Invalid(f"The store URL's parameter {name} is not a number.", param="store.url") from None
        if known == "port":
            _check_port(value)
        pairs.append((known, value))
    return urlencode(pairs)


def _check_port(text: str | None) -> None:
    if text is not None and not (text.isascii() and text.isdecimal() and 0 < int(text) < 65_536):
        raise Invalid("The store URL's port is not a number from 1 to 65535.", param="store.url")
