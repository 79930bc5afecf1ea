"""Keeps one engine running for the gateway: starts it, connects, notices its death, and starts it again after a pause.

`gateway.link.lives` decides how long a pause is, and when the engine counts as failing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.config import EngineConfig
from gateway.link.lives import EngineLives
from gateway.link.process import EngineProcess, EngineStartError
from gateway.lock import is_held

_log = logging.getLogger("terazi.engine")

STOP_GRACE_SECONDS = 5.0
PREDECESSOR_SECONDS = 10.0

Hook = Callable[[], Awaitable[None]]


class EngineFollower:
    """Keeps a connection to an engine that somebody else runs (`terazi engine --listen`).

    `connect` connects to the engine, as for EngineSupervisor. `wait_closed` waits until that connection has ended. The
    engine keeps its model while gateways come and go.
    """

    def __init__(
        self,
        lives: EngineLives,
        connect: Hook,
        wait_closed: Hook,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lives = lives
        self._connect = connect
        self._wait_closed = wait_closed
        self._pause = pause

    async def run(self) -> None:
        """Connect again and again, until cancelled. If the engine is not there yet, wait for it."""
        while True:
            self._lives.starting()
            try:
                await self._connect()
            except EngineStartError as error:
                pause = self._lives.ended(str(error))
                _log.warning("%s Trying again in %.1f s", error, pause)
            else:
                self._lives.ready()
                await self._wait_closed()
                # Two gateways on one engine take it from each other. The pauses grow, so that this does not go on at
                # once for ever.
                pause = self._lives.ended("the connection to the engine has ended; does another gateway use it?")
                doubt = "An engine serves one gateway at a time: does another one use it? "
                _log.error(
                    "the connection to the engine has ended; its requests end with an error. %sTrying again in %.1f s",
                    "" if self._lives.is_steady else doubt,
                    pause,
                )
                self._lives.num_restarts += 1
            await self._pause(pause)

    async def stop(self) -> None:
        """Does nothing: the engine is not ours to end."""


class EngineSupervisor:
    """Owns the engine process. `connect` runs after each start, `disconnect` after each death or failed start."""

    def __init__(
        self,
        config: EngineConfig,
        socket_path: Path,
        lives: EngineLives,
        connect: Hook,
        disconnect: Hook,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lives = lives
        self._config = config
        self._socket_path = socket_path
        self._connect = connect
        self._disconnect = disconnect
        self._pause = pause
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id; None when no process was started."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keep the engine running, until cancelled.

        Raises EngineStartError when the very first start fails, because then the settings are most likely wrong.
        """
        is_first = True
        await self._wait_for_predecessor()
        while True:
            self._lives.starting()
            self._process = EngineProcess(self._config, self._socket_path)
            try:
                await self._process.start()
                await self._connect()
            except EngineStartError as error:
                if is_first:
                    raise
                reason = str(error)
                _log.error("the engine did not start again: %s", reason)
                await self._process.stop(0.0)
            else:
                is_first = False
                self._lives.ready()
                reason = self._process.describe_end(await self._process.wait())
                _log.error("the engine ended with %s; its requests end with an error", reason)
            await self._disconnect()
            pause = self._lives.ended(reason)
            _log.warning("starting the engine again in %.1f s", pause)
            await self._pause(pause)
            self._lives.num_restarts += 1

    async def _wait_for_predecessor(self) -> None:
        """Wait up to PREDECESSOR_SECONDS for the engine of an earlier gateway to release the socket.

        The engine of a gateway that was killed ends at its next step boundary, and holds the socket until then.
        """
        deadline = time.monotonic() + PREDECESSOR_SECONDS
        while is_held(Path(f"{self._socket_path}.lock")) and time.monotonic() < deadline:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the engine: close its stdin, and kill it after STOP_GRACE_SECONDS."""
        if self._process is not None:
            await self._process.stop(STOP_GRACE_SECONDS)
