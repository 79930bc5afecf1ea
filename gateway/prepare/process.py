"""The gateway's side of `gateway.prepare.worker`: starts the worker when it is needed, and ends it when it is idle.

The worker gets one order at a time. It is spawned, not forked, so it shares nothing with the gateway. It ends when the
gateway's end of its stdin closes, so also when the gateway is killed. When a worker dies or takes too long, the one
request that it worked on fails, and the next order starts a new worker.
"""

import asyncio
import contextlib
import logging
import math
import os
import sys

import msgspec

from engine.wire.messages import Hello
from gateway.openai.wire import Endpoint
from gateway.prepare.worker import LENGTH_BYTES, Answer, Order, decode_answer, frame

_log = logging.getLogger("terazi.prepare")

# -P: Python must not import a folder called `gateway` from the working directory instead of our package.
COMMAND = (sys.executable, "-P", "-m", "gateway.prepare.worker")
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
_END_SECONDS = 2.0  # from closing the worker's stdin to killing it


class WorkerLost(Exception):
    """The worker ended, or was killed, before it answered. The text says why."""


class PrepareProcess:
    """Owns at most one worker process. Calls of `call` must not overlap.

    `memory_bytes` is the most memory that the worker may take. `run_seconds` is the most time that one order may take,
    the worker's start included. After `idle_seconds` without an order the worker ends.
    """

    def __init__(self, *, memory_bytes: int, run_seconds: float, idle_seconds: float) -> None:
        self._memory_bytes = memory_bytes
        self._run_seconds = run_seconds
        self._idle_seconds = idle_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # log readers and endings
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is no worker."""
        return self._process.pid if self._process is not None else None

    async def call(
        self, endpoint: Endpoint, body: bytes, *, is_json: bool, hello: Hello, default_max_tokens: int
    ) -> Answer:
        """The worker's answer to one order. Raises WorkerLost."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        order = Order(
            endpoint=endpoint,
            is_json=is_json,
            hello=hello,
            default_max_tokens=default_max_tokens,
            num_bytes=len(body),
            seconds=math.ceil(self._run_seconds),
        )
        try:
            async with asyncio.timeout(self._run_seconds):
                process = await self._started()
                answer = await self._exchange(process, order, body)
        except TimeoutError:
            self._drop(kill=True)
            raise WorkerLost(f"it took longer than {self._run_seconds:g} s") from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._drop()  # not killed: a worker that is ending has time to print its traceback
            raise WorkerLost(str(error) or type(error).__name__) from None
        except asyncio.CancelledError:
            self._drop(kill=True)  # or the next order would get the answer to this one
            raise
        self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._drop)
        return answer

    async def stop(self) -> None:
        """End the worker and wait until it is gone."""
        self._drop(kill=True)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._drop(kill=True)
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            str(self._memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            limit=1 << 20,
            start_new_session=True,  # Ctrl-C in a terminal goes to the gateway alone
        )
        self._process = process
        self.num_starts += 1
        self._keep(asyncio.create_task(self._read_log(process), name="prepare-log"))
        return process

    @staticmethod
    async def _exchange(process: asyncio.subprocess.Process, order: Order, body: bytes) -> Answer:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame(order))
        process.stdin.write(body)
        await process.stdin.drain()
        length = await process.stdout.readexactly(LENGTH_BYTES)
        return decode_answer(await process.stdout.readexactly(int.from_bytes(length, "big")))

    def _drop(self, *, kill: bool = False) -> None:
        """Give this worker no more orders. It ends by itself, or is killed at once with `kill`."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        process, self._process = self._process, None
        if process is not None:
            self._keep(asyncio.create_task(self._end(process, kill=kill), name="prepare-end"))

    @staticmethod
    async def _end(process: asyncio.subprocess.Process, *, kill: bool) -> None:
        assert process.stdin is not None
        if not kill:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        process.stdin.close()

    @staticmethod
    async def _read_log(process: asyncio.subprocess.Process) -> None:
        """Log what the worker writes to stderr, which is nothing but a traceback at its end."""
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # a line beyond the reader's limit
            async for raw in process.stderr:
                _log.warning("%s", raw.decode(errors="replace").rstrip())

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
