"""aiosqlite, but its threads end quietly.

aiosqlite runs each connection in a thread that hands results back to the event loop. When a connection cannot be
opened, or a task is cancelled while its query runs, the loop may be closed by then, and the thread dies with a
traceback on stderr, after the command has printed its one clear line. Nobody waits for that result any more, so it is
dropped.
"""

import sqlite3
from threading import Thread
from typing import Any

from aiosqlite.core import Connection, _connection_worker_thread

_ROWS_PER_FETCH = 64  # aiosqlite's default


class QuietConnection(Connection):
    """An aiosqlite connection whose thread outlives the loop it answers to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(lambda: sqlite3.connect(*args, **options), _ROWS_PER_FETCH)
        self._thread = Thread(target=self._work, daemon=True, name="sqlite")

    def _work(self) -> None:
        while True:
            try:
                _connection_worker_thread(self._tx)
                return
            except RuntimeError:  # the loop is closed
                if self._connection is None and not self._running:
                    return


def connect(*args: Any, **options: Any) -> QuietConnection:
    """What SQLAlchemy calls in place of aiosqlite.connect; the arguments are sqlite3.connect's."""
    return QuietConnection(*args, **options)
