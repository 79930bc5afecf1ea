"""Log lines on stderr, as JSON objects or as text. No line holds an API key, an admin token or a URL's password."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

from tenants.store_url import scrubbed

# Matches parts of a key too, because a truncated key is still a secret. The public id is no secret, so it stays.
_SECRETS = re.compile(r"(trz-[0-9A-Za-z]{12}-)[0-9A-Za-z]{4,}|(trza-)[0-9A-Za-z_-]{4,}")
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def redact(text: str) -> str:
    """The text without secrets."""
    return scrubbed(_SECRETS.sub(lambda found: (found[1] or found[2]) + "***", text))


def one_line(text: str, chars_max: int) -> str:
    """`text` as one printable line of at most `chars_max` characters, without secrets.

    Characters that are not printable are written as their escapes. So a caller whose text is logged cannot begin a new
    line.
    """
    # Take the secrets out first, then cut: a secret that is cut in the middle no longer looks like a secret.
    shown = _printable(redact(text.strip()))
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class TextFormatter(logging.Formatter):
    """`time level logger message key=value ...`. Message and values are printable, so only a traceback adds lines."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={value}" for name, value in _extra(record).items())
        text = _printable(f"{record.getMessage().rstrip()}{extra}")
        line = f"{_time(record)} {record.levelname.lower()} {record.name} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return redact(line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; fields given as `extra` stand beside time, level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        entry |= {"message": record.getMessage(), **_extra(record)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return redact(json.dumps(entry, default=str))


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Lines(logging.StreamHandler[TextIO]):
    """When a line cannot be written (the reader has left, the disk is full), the line is lost and the server goes
    on."""

    def handleError(self, record: logging.LogRecord) -> None:  # the name is logging's
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def set_up(log_format: str, level: str) -> None:
    """Send every logger's lines to stderr. Library chatter below WARNING is dropped."""
    handler = _Lines(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("terazi").setLevel(level.upper())
