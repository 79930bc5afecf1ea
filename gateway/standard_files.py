"""Keeps standard input, output and error usable when a reader has left, or when the command was started without them.

Three things would go wrong otherwise:

- The kernel gives the number of a standard file that was closed at the start (`>&-`) to the next file that is opened. A
  stray message could then be written into the database.
- After a reader has left (`| head -1`), every later write fails.
- What is still buffered at the end fails when the interpreter ends, with a message and exit code 120.
"""

import contextlib
import errno
import os
import sys
from typing import TextIO

# EPIPE: the reader has left. EIO: the terminal has hung up.
_NOBODY_READS = (errno.EPIPE, errno.EIO)


def hold() -> None:
    """Put /dev/null in the place of each standard file that is closed. Call it before any other file is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free number. That is `number`, since all numbers below it are open by now.
            opened = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            assert opened == number, "a standard file was opened by somebody else at the same time"
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = _over(0, "r")
    if sys.stdout is None:
        sys.stdout = _over(1, "w")
    if sys.stderr is None:
        sys.stderr = _over(2, "w")


def _over(number: int, mode: str) -> TextIO:
    """A text file on the standard descriptor `number`. Closing the file leaves the descriptor open."""
    return open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # type: ignore[return-value]


def nobody_reads(error: OSError) -> bool:
    """Whether a write failed with `error` because its reader has left."""
    return error.errno in _NOBODY_READS


def say(text: str) -> OSError | None:
    """Print `text` on standard output at once. When that fails, drop all further output and return the error.

    For a server, whose output is a courtesy: a failure to print is no reason to end.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        give_up(sys.stdout)
        return error
    return None


def give_up(stream: TextIO) -> None:
    """Send what `stream` has buffered, and all that is written to it from now on, to /dev/null."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def finish() -> OSError | None:
    """Write what is buffered, at a command's end.

    Returns the error of standard output, but None when its reader left.
    """
    failure = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            give_up(stream)
            if stream is sys.stdout and not nobody_reads(error):
                failure = error
        except ValueError:
            pass  # the stream is closed already: its reader had left
    return failure
