"""Log lines on stderr: one JSON object or one line of text each, without API keys, admin tokens and URLs' passwords."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

from tenants.store_url import scrubbed

# Wider than a whole key on purpose: a truncated key is still a secret. The public id stays, it is no secret.
_SECRETS = re.compile(r"(trz-[0-9A-Za-z]{12}-)[0-9A-Za-z]{4,}|(trza-)[0-9A-Za-z_-]{4,}")
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def redact(text: str) -> str:
    """The text without secrets."""
    return scrubbed(_SECRETS.sub(lambda found: (found[1] or found[2]) + "***", text))


def one_line(text: str, chars_max: int) -> str:
    """`text` as one printable line of at most `chars_max` characters, without secrets.

    What is not printable is written as its escape, so that nobody whose text is logged can begin a line of his own.
    """
    # Cut only after the secrets are out: a part of a secret that is cut away no longer looks like one.
    shown = _printable(redact(text.strip()))
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class TextFormatter(logging.Formatter):
    """`time level logger message key=value ...`; message and values are printable, so a record begins one line."""

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
    """A line that cannot be written, since the reader has left or the disk is full, is lost and nothing else."""

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
