"""What commands print, and how they end: one JSON document or a table, and the exit codes of docs/reference.md.

0 ok   1 error   2 usage   3 not found   4 conflict   5 denied   6 unreachable or locked
"""

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway import standard_files

EXIT_ERROR, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_CONFLICT, EXIT_DENIED, EXIT_UNREACHABLE = 1, 2, 3, 4, 5, 6


_MOMENT = re.compile(r"\b(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.\d+(Z|[+-]\d\d:\d\d)", re.ASCII)


class CommandError(Exception):
    """A command that cannot do what it was asked: one line and an exit code."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR, code: str = "error") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.code = code


# Databases, journals, logs and reports name teams and what they do: they are for their owner, also below a directory
# that others may enter. Whoever is to read them gets the permission afterwards.
PRIVATE_UMASK = 0o077


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Run a command: what it makes is its user's alone, and what it raises becomes one line on stderr (with --json also
    a document on stdout) and its exit code."""
    before = os.umask(PRIVATE_UMASK)
    try:
        with _reporting(as_json):
            yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _reporting(as_json: bool) -> Iterator[None]:
    from gateway.lock import DataDirLocked, DataDirUnusable
    from gateway.settings.file import SettingsError
    from tenants.disk import disk_trouble
    from tenants.errors import NotFound, StoreUnavailable, StoreUnreadable, TenantError

    try:
        yield
        flush_standard_output()
        return
    except CommandError as error:
        failure = error
    except SettingsError as error:
        failure = CommandError(str(error), EXIT_USAGE, "invalid_setting")
    except DataDirLocked as error:
        failure = CommandError(str(error), EXIT_UNREACHABLE, "data_dir_locked")
    except DataDirUnusable as error:
        failure = CommandError(str(error), EXIT_ERROR, "data_dir_unusable")
    except StoreUnreadable as error:
        failure = CommandError(error.message, EXIT_DENIED, error.code)
    except StoreUnavailable as error:
        failure = CommandError(error.message, EXIT_UNREACHABLE, error.code)
    except NotFound as error:
        failure = CommandError(error.message, EXIT_NOT_FOUND, error.code)
    except TenantError as error:
        failure = CommandError(error.message, EXIT_ERROR, error.code)
    except BrokenPipeError:
        # `terazi ... | head`: the reader has enough.
        standard_files.give_up(sys.stdout)
        raise SystemExit(0) from None
    except OSError as error:
        # A file of the data directory that is no file, or whose disk fails; httpx's errors are none of these.
        text = disk_trouble(error) or (f"{error.filename}: {error.strerror}" if error.filename else str(error))
        failure = CommandError(text, EXIT_ERROR, "data_dir_unusable")
        try:
            flush_standard_output()  # or it was this that failed
        except CommandError as of_output:
            failure = of_output
    if as_json:
        with contextlib.suppress(OSError, CommandError):  # standard output may be what failed
            print_json(error_document(failure.code, str(failure)))
    print(f"terazi: {failure}", file=sys.stderr)
    raise SystemExit(failure.exit_code)


def flush_standard_output() -> None:
    """Write now what was printed. Raises BrokenPipeError when nobody reads it, CommandError when that is impossible."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        standard_files.give_up(sys.stdout)
        raise output_failure(error) from None


def output_failure(error: OSError) -> CommandError:
    """What to say of standard output that cannot be written."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = "the disk is full: standard output" if is_full else f"standard output cannot be written: {error.strerror}"
    return CommandError(text, code="out_unwritable")


def error_document(code: str, message: str) -> dict[str, Any]:
    """What a command with --json prints when it cannot do what it was asked."""
    return {"error": {"code": code, "message": message}}


def print_json(value: Any) -> None:
    """One document, and nothing else on stdout. Raises BrokenPipeError, or CommandError when it cannot be written."""
    try:
        print(json_text(value))
    except BrokenPipeError:
        raise
    except OSError as error:  # a document that is larger than the buffer is written at once
        standard_files.give_up(sys.stdout)
        raise output_failure(error) from None


def json_text(value: Any) -> str:
    """A document as commands print it."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def cell(value: Any) -> str:
    """A value as text: None is a dash, floats have 3 decimals, lists are joined, times have whole seconds."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return _MOMENT.sub(r"\1\2", str(value))


def print_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | None = None,
    title: str = "",
    *,
    has_total: bool = False,
) -> None:
    """Rows as a table; the columns are the first row's keys unless given. Text is printed as text, never as markup.
    With `has_total` a rule stands before the last row.

    What is too wide for the terminal gets headers of a word a line; else is turned on its side, a column for each row;
    else becomes one record after the other. No value is ever cut or folded.
    """
    from rich.console import Console
    from rich.measure import Measurement

    # A pipe has no width of its own: never fold what another program will read.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    if not rows:
        print(f"{title}: none" if title else "none")
        return
    if title:
        print(title)
    columns = list(columns or rows[0])
    names = [column.replace("_", " ") for column in columns]
    numeric = [all(isinstance(row.get(column), (int, float, type(None))) for row in rows) for column in columns]
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    across = [names, *cells]
    sideways = list(map(list, zip(*across, strict=True)))
    for lines, is_right in (
        (across, numeric),
        ([[name.replace(" ", "\n") for name in names], *cells], numeric),
        (sideways, [False] + [True] * len(rows)),
    ):
        table = _table(lines, is_right, has_total and lines is not sideways)
        if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
            with console.capture() as captured:
                console.print(table)
            print("\n".join(line.rstrip() for line in captured.get().splitlines()))
            return
    for row in cells:
        print()
        print_record(dict(zip(names, row, strict=True)))
    print()


def _table(lines: Sequence[Sequence[str]], is_right: Sequence[bool], has_total: bool) -> Any:
    """The first line is the header."""
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    # rich's SIMPLE_HEAD, with a rule at the end of a section too
    table = Table(box=Box("    \n    \n ── \n    \n ── \n    \n    \n    \n"))
    for name, right in zip(lines[0], is_right, strict=True):
        table.add_column(Text(name), justify="right" if right else "left", no_wrap=True)
    for place, line in enumerate(lines[1:], start=2):
        table.add_row(*(Text(text) for text in line), end_section=has_total and place == len(lines) - 1)
    return table


def print_record(record: Mapping[str, Any]) -> None:
    """One thing as `name  value` lines."""
    width = max((len(name) for name in record), default=0)
    for name, value in record.items():
        print(f"{name:<{width}}  {cell(value)}")
