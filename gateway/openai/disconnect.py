"""Notices that a client has left, from the moment its body has been read until its request has ended.

An ASGI server does not cancel a handler that waits. It reports a disconnect only to a task that awaits `receive()`,
which is what `Departure` does.
"""

import asyncio
from collections.abc import Callable

from starlette.types import Receive

from gateway.errors import ClientGone


class Departure:
    """Owns the task that watches one client. Start it, and stop it in the request's `finally`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self._on_leave: Callable[[], None] | None = None
        self.is_gone = False

    def start(self) -> None:
        """Begin to watch. The body must have been read."""
        self._task = asyncio.create_task(self._watch(), name="client-departure")

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when the client leaves. If the client has left already, it is called at once."""
        self._on_leave = callback
        if self.is_gone:
            callback()

    def check(self) -> None:
        """Raises ClientGone when the client has left."""
        if self.is_gone:
            raise ClientGone

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # a server may still hand over an empty part of the body
        self.is_gone = True
        if self._on_leave is not None:
            self._on_leave()

    async def stop(self) -> None:
        """Stop watching and wait for the task's end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
