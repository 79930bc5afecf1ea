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
    """A command cannot do what it was asked. Holds one line for stderr, the exit code, and a code for --json."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR, code: str = "error") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.code = code


# The files a command makes (databases, journals, logs, reports) name teams and what the teams do. So only the user who
# runs the command may read them, even where others may enter the directory. An operator who wants others to read a file
# changes its mode afterwards.
PRIVATE_UMASK = 0o077


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Run a command inside the block, with the umask PRIVATE_UMASK.

    An error that the block raises ends the process: one line on stderr, with `as_json` also a document on stdout, and
    the exit code of that error. Raises SystemExit.
    """
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
        # A file of the data directory is not a regular file, or its disk fails. httpx's errors are not OSErrors.
        text = disk_trouble(error) or (f"{error.filename}: {error.strerror}" if error.filename else str(error))
        failure = CommandError(text, EXIT_ERROR, "data_dir_unusable")
        try:
            flush_standard_output()  # this may be the write that failed
        except CommandError as of_output:
            failure = of_output
    if as_json:
        with contextlib.suppress(OSError, CommandError):  # standard output may be what failed
            print_json(error_document(failure.code, str(failure)))
    print(f"terazi: {failure}", file=sys.stderr)
    raise SystemExit(failure.exit_code)


def flush_standard_output() -> None:
    """Write what was printed now.

    Raises BrokenPipeError when the reader has left, and CommandError when standard output cannot be written.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        standard_files.give_up(sys.stdout)
        raise output_failure(error) from None


def output_failure(error: OSError) -> CommandError:
    """The error to raise when standard output cannot be written because of `error`."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = "the disk is full: standard output" if is_full else f"standard output cannot be written: {error.strerror}"
    return CommandError(text, code="out_unwritable")


def error_document(code: str, message: str) -> dict[str, Any]:
    """What a command with --json prints when it cannot do what it was asked."""
    return {"error": {"code": code, "message": message}}


def print_json(value: Any) -> None:
    """Print one JSON document, and nothing else, on stdout.

    Raises BrokenPipeError when the reader has left, and CommandError when standard output cannot be written.
    """
    try:
        print(json_text(value))
    except BrokenPipeError:
        raise
    except OSError as error:  # print itself writes a document that is larger than the buffer
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
    """Print rows as a table. Without `columns`, the columns are the keys of the first row.

    `has_total` draws a rule before the last row. Text is printed as it is, never read as markup, and no value is cut or
    folded. The first of these layouts that fits the terminal's width is used:

    - the table as it is,
    - the table with each header broken into one word a line,
    - the table on its side, with one column for each row,
    - one record after the other.
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
    """A rich table of `lines`, of which the first holds the headers."""
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
    """Print one record as lines of `name  value`."""
    width = max((len(name) for name in record), default=0)
    for name, value in record.items():
        print(f"{name:<{width}}  {cell(value)}")
