"""Standard input, output and error of a command whose reader has left, or that was started without them.

Three things go wrong otherwise. A descriptor that was closed at the start (`>&-`) is given to the next file that is
opened, so that a stray message could be written into the database. A reader that leaves (`| head -1`) makes every later
write fail. What is still buffered at the end fails when the interpreter ends, with a message and exit code 120.
"""

import contextlib
import errno
import os
import sys
from typing import TextIO

# The reader has left, or the terminal has (a write to a terminal that hung up).
_NOBODY_READS = (errno.EPIPE, errno.EIO)


def hold() -> None:
    """Put /dev/null in the place of each standard file that is closed. Call it before anything else is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is the one that is closed, since those below it are open by now.
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
    """A text file on one of the standard descriptors, which it leaves open."""
    return open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # type: ignore[return-value]


def nobody_reads(error: OSError) -> bool:
    """Is this what a write says when its reader has left?"""
    return error.errno in _NOBODY_READS


def say(text: str) -> OSError | None:
    """Print `text` on standard output at once. When it cannot be written, all further output is dropped.

    For a server: what it prints is for whoever looks, and never a reason to end. Returns why it could not be written.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        give_up(sys.stdout)
        return error
    return None


def give_up(stream: TextIO) -> None:
    """Send what this stream holds, and all that is still written to it, to /dev/null."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def finish() -> OSError | None:
    """Write what is buffered, at a command's end. Returns why it could not be written, unless nobody reads it."""
    failure = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            give_up(stream)
            if stream is sys.stdout and not nobody_reads(error):
                failure = error
        except ValueError:
            pass  # closed by whoever knew that nobody reads it
    return failure
