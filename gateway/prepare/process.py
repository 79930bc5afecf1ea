"""The gateway's side of `gateway.prepare.worker`: start it when it is needed, one order at a time, end it when idle.

It is spawned, not forked, so it shares nothing with the gateway. It ends when the gateway's end of its stdin closes
(also by SIGKILL of the gateway). A worker that dies, or takes too long, costs the one request it worked on; the next
order starts another.
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

# -P: a folder called `gateway` where the server was started must not take the place of ours.
COMMAND = (sys.executable, "-P", "-m", "gateway.prepare.worker")
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
_END_SECONDS = 2.0  # from closing its stdin to killing it


class WorkerLost(Exception):
    """The worker ended, or was ended, before it answered. The text says how."""


class PrepareProcess:
    """Owns at most one worker process. Calls must not overlap.

    memory_bytes: the most that the worker may take. run_seconds: the most that one order may take, the worker's start
    included. idle_seconds: after so long without an order the worker ends.
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
        """The worker's process id; None while there is none."""
        return self._process.pid if self._process is not None else None

    async def call(
        self, endpoint: Endpoint, body: bytes, *, is_json: bool, hello: Hello, default_max_tokens: int
    ) -> Answer:
        """The worker's answer. Raises WorkerLost."""
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
            self._drop()  # one that ends by itself is left the time to say why
            raise WorkerLost(str(error) or type(error).__name__) from None
        except asyncio.CancelledError:
            self._drop(kill=True)  # it would answer the next order with this one's answer
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
        """No more orders for this worker: it ends by itself, or at once with `kill`."""
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
        """What it writes to stderr: nothing, but for the traceback of its end."""
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # a line beyond the reader's limit
            async for raw in process.stderr:
                _log.warning("%s", raw.decode(errors="replace").rstrip())

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
