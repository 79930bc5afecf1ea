"""The engine as a child process: starts it, sees when it listens and when it dies, and stops it.

The child's stdin is a pipe that this process holds open. When the pipe closes, the engine ends. So it ends also when
this process is killed.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from gateway.settings.values import SETTINGS, Settings

_log = logging.getLogger("terazi.engine")

# -P: Python must not import a folder called `engine` from the working directory instead of our package.
COMMAND = (sys.executable, "-P", "-m", "engine")
# A Unix socket's path is limited to 107 bytes on Linux.
MAX_SOCKET_PATH_BYTES = 100
_TAIL_LINES = 20
_ERROR_PREFIX = "terazi-engine:"  # the line of an engine that cannot start
_LOG_PREFIX = "engine: "


class EngineStartError(Exception):
    """The engine did not start, or cannot be used. The text is one clear line, if possible the engine's own."""


def socket_path_for(data_dir: Path) -> Path:
    """Where this server's engine listens: DATA_DIR/run/engine.sock, or a path in a short private directory.

    The short path is used when the first is too long for a socket. It is the same at each start, because the engine
    keeps its epoch beside the socket. Raises EngineStartError when the directory belongs to another user.
    """
    path = data_dir / "run" / "engine.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"terazi-{os.getuid()}-{digest}" / "engine.sock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise EngineStartError(f"{path.parent} belongs to another user; set TMPDIR or use a shorter --data-dir")
    path.parent.chmod(0o700)
    return path


class EngineProcess:
    """One run of `python -m engine`. For a restart make a new object."""

    def __init__(self, config: EngineConfig, socket_path: Path) -> None:
        self._config = config
        self._socket_path = socket_path
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._stderr_tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._listening: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and wait until it listens. Raises EngineStartError with the engine's own reason."""
        command = [*COMMAND, "--socket", str(self._socket_path)]
        command += ["--config", msgspec.json.encode(self._config).decode(), "--parent-stdin"]
        environment = dict(os.environ)
        # OpenMP threads that spin would take the core that the engine leaves for the gateway.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._listening = asyncio.get_running_loop().create_future()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                limit=1 << 20,
                start_new_session=True,  # Ctrl-C in a terminal goes to the gateway alone, which drains
            )
        except OSError as error:  # no memory, process id or file is left, which may pass: a failed start, no bug
            raise EngineStartError(f"the engine process cannot be started: {error.strerror or error}") from error
        self._readers = [asyncio.create_task(self._read_stdout()), asyncio.create_task(self._read_stderr())]
        exited = asyncio.create_task(self._process.wait())
        waited: set[asyncio.Future[Any]] = {self._listening, exited}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if not self._listening.done():
            code = await self.wait()
            raise EngineStartError(self._why(code))

    async def wait(self) -> int:
        """Wait until the process has ended. Returns its exit code; a negative code is a signal's number."""
        assert self._process is not None, "start first"
        code = await self._process.wait()
        for reader in self._readers:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(reader), 1.0)
        return code

    async def stop(self, grace_seconds: float) -> None:
        """Close the process's stdin, wait up to `grace_seconds`, then kill it. Returns when the process is gone."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), grace_seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    @property
    def _is_listening(self) -> bool:
        return self._listening is not None and self._listening.done()

    def last_words(self) -> str:
        """The last error line on the process's stderr, "" if there is none. Log lines and stack frames do not count."""
        for line in reversed(self._stderr_tail):
            if line.startswith(_ERROR_PREFIX):
                return line.removeprefix(_ERROR_PREFIX).strip()
        errors = [line for line in self._stderr_tail if not line.startswith((_LOG_PREFIX, " ", "\t", "Traceback "))]
        return errors[-1] if errors else ""

    def describe_end(self, code: int) -> str:
        """How the process ended: its exit code or signal, and its last error line."""
        words = self.last_words()
        return (f"signal {-code}" if code < 0 else f"exit code {code}") + (f": {words}" if words else "")

    def _why(self, code: int) -> str:
        if any(line.startswith(_ERROR_PREFIX) for line in self._stderr_tail):
            return self.last_words()
        return f"the engine process ended with {self.describe_end(code)}"

    async def _read_stdout(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._listening is not None
        async for raw in self._process.stdout:
            with contextlib.suppress(ValueError):
                event = json.loads(raw)
                if isinstance(event, dict) and event.get("event") == "listening" and not self._listening.done():
                    self._listening.set_result(None)

    async def _read_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._stderr_tail.append(line)
                # Before the engine listens, `start` raises its error line, so the line is not logged too.
                if self._is_listening or not line.startswith(_ERROR_PREFIX):
                    _log.info("%s", line.removeprefix(_LOG_PREFIX))


def named_by_source(text: str, settings: Settings) -> str:
    """`text`, in which the engine speaks of flags, with each flag replaced by the value's source if that was no flag.

    The source is an environment variable, or a setting in the file with its line.
    """
    for row in SETTINGS:
        kind, _, where = settings.sources[row.name].partition(" ")
        if row.flag and kind in ("environment", "file"):
            name = where if kind == "environment" else f"{row.path} ({where})"
            text = re.sub(rf"(?<![\w-]){row.flag}(?![\w-])", name.replace("\\", r"\\"), text)
    return text


def engine_config(settings: Settings) -> EngineConfig:
    """The part of the settings that the engine gets."""
    return EngineConfig(
        kind=settings.engine,
        model=settings.model,
        policy=settings.policy,
        coast=settings.coast,
        dtype=settings.dtype,
        device=settings.device,
        num_threads=settings.num_threads,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        prefill_chunk_us=round(settings.prefill_chunk_time * 1e6),
        step_time_max_us=round(settings.step_time_max * 1e6),
        isolation=settings.isolation,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        host_kv_memory_bytes=settings.host_kv_memory,
        memory_preemption=settings.memory_preemption,
        swap_benefit=settings.swap_benefit,
        swap_min_run_steps=settings.swap_min_run_steps,
        swap_link_percent=settings.swap_link_percent,
        promotion_percent=settings.promotion_percent,
        max_queued_requests=settings.max_queued_requests,
        deterministic=settings.deterministic,
        kv_canary=settings.kv_canary,
        step_log=settings.step_log,
        step_log_max_bytes=settings.step_log_max_bytes,
        cache_dir=settings.cache_dir,
    )
