"""Keeps one engine running for the gateway: start, connect, notice its death, start again with growing pauses."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.config import EngineConfig
from gateway.engine_process import EngineProcess, EngineStartError
from gateway.lock import is_held

_log = logging.getLogger("terazi.engine")

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
# An engine that ran this long died of something new: pauses start over.
STEADY_SECONDS = 60.0
STOP_GRACE_SECONDS = 5.0
PREDECESSOR_SECONDS = 10.0

Hook = Callable[[], Awaitable[None]]


class EngineFollower:
    """An engine that somebody else runs (`terazi engine --listen`): connects to it, again and again.

    `connect` as for EngineSupervisor; `wait_closed` ends when that connection has. The engine keeps its model while
    gateways come and go.
    """

    num_restarts = 0

    def __init__(
        self,
        connect: Hook,
        wait_closed: Hook,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._wait_closed = wait_closed
        self._pause = pause
        self._now = now

    async def run(self) -> None:
        """Until cancelled. An engine that is not there yet is waited for."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._connect()
            except EngineStartError as error:
                _log.warning("%s Trying again in %.1f s", error, pause)
            else:
                connected = self._now()
                await self._wait_closed()
                # Two gateways on one engine take it from each other: were the pause to start over each time, for ever.
                is_steady = self._now() - connected > STEADY_SECONDS
                pause = FIRST_PAUSE_SECONDS if is_steady else pause
                _log.error(
                    "the connection to the engine has ended; its requests end with an error. %sTrying again in %.1f s",
                    "" if is_steady else "An engine serves one gateway at a time: does another one use it? ",
                    pause,
                )
                self.num_restarts += 1
            await self._pause(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    async def stop(self) -> None:
        """It is not ours to end."""


class EngineSupervisor:
    """Owns the engine process. `connect` runs after each start; `disconnect` after each death."""

    def __init__(
        self,
        config: EngineConfig,
        socket_path: Path,
        connect: Hook,
        disconnect: Hook,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config = config
        self._socket_path = socket_path
        self._connect = connect
        self._disconnect = disconnect
        self._pause = pause
        self._process: EngineProcess | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Until cancelled. Raises EngineStartError when the very first start fails: then the settings are wrong."""
        pause = FIRST_PAUSE_SECONDS
        is_first = True
        await self._wait_for_predecessor()
        while True:
            started = time.monotonic()
            self._process = EngineProcess(self._config, self._socket_path)
            try:
                await self._process.start()
                await self._connect()
            except EngineStartError as error:
                if is_first:
                    raise
                _log.error("the engine did not start again: %s", error)
                await self._process.stop(0.0)
            else:
                is_first = False
                code = await self._process.wait()
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                _log.error("the engine ended with %s; its requests end with an error", end)
            await self._disconnect()
            if time.monotonic() - started > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            _log.warning("starting the engine again in %.1f s", pause)
            await self._pause(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)
            self.num_restarts += 1

    async def _wait_for_predecessor(self) -> None:
        """The engine of a gateway that was killed ends at its next step boundary; until then it holds the socket."""
        deadline = time.monotonic() + PREDECESSOR_SECONDS
        while is_held(Path(f"{self._socket_path}.lock")) and time.monotonic() < deadline:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the engine: its stdin closes, then SIGKILL after a grace."""
        if self._process is not None:
            await self._process.stop(STOP_GRACE_SECONDS)
