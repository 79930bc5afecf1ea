"""`terazi serve`: composes store, engine and the two HTTP listeners, and takes them down in the right order.

Up:   lock, sockets, schema, snapshot, ledger, HTTP (alive, not ready), engine, ready.
Down: not ready, no new connections, running requests up to the drain time, the rest with an error event, ledger
      written, engine ended, lock released. SIGTERM and SIGINT start the way down; a second signal changes nothing.

By default SIGHUP, SIGUSR1 and SIGUSR2 would end the process and every running request. Here each of them only leaves a
line in the log. SIGQUIT prints where each thread stands.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from engine.wire.messages import Hello, ServiceSamples
from gateway import lock, logs, process_memory, standard_files
from gateway.admin.app import AdminState, admin_app
from gateway.command import EXIT_UNREACHABLE, CommandError, json_text
from gateway.errors import EngineDied
from gateway.link.client import EngineClient
from gateway.link.lives import EngineLives
from gateway.link.process import EngineStartError, engine_config, named_by_source, socket_path_for
from gateway.link.supervisor import EngineFollower, EngineSupervisor
from gateway.listen.listeners import (
    RESERVED_FILES,
    HttpServer,
    ListenError,
    bind,
    make_server,
    raise_file_limit,
    url_of,
)
from gateway.listen.protocol import HEAD_SECONDS, OnRefusal
from gateway.metrics.families import GatewayMetrics, not_ready_reasons
from gateway.openai import booking
from gateway.openai.app import public_app
from gateway.openai.state import GatewayState, HttpSettings, engine_document
from gateway.refusals import RefusalLog, wire_refusals
from gateway.settings.values import Settings, as_rows
from gateway.store import open_store
from gateway.text.tokenizer import ModelTokenizer
from tenants.clock import wall_clock_us
from tenants.disk import disk_trouble
from tenants.errors import StoreInUse, StoreUnreachable, TenantError
from tenants.snapshot import Snapshot

_log = logging.getLogger("terazi.serve")

# A closed terminal and the reload of a systemd unit send SIGHUP; log rotation sends the other two.
GOES_ON_AFTER = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
QUICKSTART_TEAM = "demo"
# After the drain time: how long clients may take to read the error events, and the last rows to be closed.
BOOKING_SECONDS = 12.0
ADMIN_CONNECTIONS_MAX = 32
FOLLOWER_PAUSE_SECONDS_MAX = 30.0
# A connection to the admin listener that has not sent its head by then is closed: it may hold one of few places.
ADMIN_HEAD_SECONDS = 5.0


def run(settings: Settings, *, quickstart: bool = False, as_json: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. `quickstart` makes a team and prints a request with a fresh key of that team.

    Raises CommandError, DataDirLocked, DataDirUnusable or StoreUnreachable, each with one line that says what to mend.
    """
    import uvloop

    process_memory.limit_arenas()
    with lock.DataDirLock(settings.data_dir):
        logs.set_up(settings.log_format, settings.log_level)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_Server(settings, quickstart=quickstart, as_json=as_json).run())
        except EngineStartError as error:
            raise CommandError(named_by_source(str(error), settings), code="start_failed") from None
        except ListenError as error:
            raise CommandError(str(error), code="start_failed") from None
        except StoreInUse as error:
            raise CommandError(error.message, EXIT_UNREACHABLE, error.code) from None
        except StoreUnreachable:
            raise
        except TenantError as error:
            raise CommandError(error.message, code=error.code) from None
        except OSError as error:
            # The disk is full or fails. That is no bug, so a traceback would not help.
            why = disk_trouble(error, settings.data_dir)
            raise CommandError(why or f"{error.filename or settings.data_dir}: {error.strerror or error}") from None
        finally:
            lock.remove_server_info(settings.data_dir)


@dataclass(slots=True)
class _Announcement:
    """What is printed once the server is ready."""

    url: str
    admin_url: str
    data_dir: str
    key: str = ""

    def show(self, hello: Hello, as_json: bool) -> None:
        model = hello.model.name
        if as_json:
            record: dict[str, object] = {"url": self.url, "admin_url": self.admin_url, "data_dir": self.data_dir}
            record |= {"model": model, "simulated": hello.is_simulated}
            _say(json_text(record | ({"key": self.key} if self.key else {})))
            return
        _say(f"terazi {version('terazi')} serves {model} at {self.url}\nadmin {self.admin_url}, data {self.data_dir}")
        if hello.is_simulated:
            _say("SIMULATED: the engine is `sim`; no model computes the answers, their tokens are made up")
        if self.key:
            _say(f"\n{curl_line(self.url, self.key, model)}\n")


def _say(text: str) -> None:
    """Print on standard output. When nobody reads it, the server logs that and goes on."""
    failure = standard_files.say(text)
    if failure is not None:
        _log.warning("standard output is lost (%s); the server goes on without it", failure.strerror)


def _note_signal(number: signal.Signals) -> None:
    _log.warning("%s: the server goes on; there is nothing to reload, and SIGTERM ends it", number.name)


def curl_line(url: str, key: str, model: str) -> str:
    """A first request, ready to paste."""
    message = '{"role": "user", "content": "What is the capital of France?"}'
    return (
        f"curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "temperature": 0, "messages": [{message}]}}\''
    )


class _Server:
    """One life of the server."""

    def __init__(self, settings: Settings, *, quickstart: bool, as_json: bool) -> None:
        self._settings = settings
        self._quickstart = quickstart
        self._as_json = as_json
        self._stop = asyncio.Event()
        self._started_at = time.monotonic()

    async def run(self) -> None:
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        for number in GOES_ON_AFTER:
            loop.add_signal_handler(number, _note_signal, number)
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # standard error may be no real file
            faulthandler.register(signal.SIGQUIT, all_threads=True)
        async with contextlib.AsyncExitStack() as stack:
            public_sockets = bind(settings.host, settings.port)
            admin_sockets = bind(settings.admin_host, settings.admin_port)
            for listener in (*public_sockets, *admin_sockets):
                stack.callback(listener.close)
            url = url_of(public_sockets, settings.host)
            self._store = await stack.enter_async_context(open_store(settings, url))
            self._supervisor = self._make_engine()
            stack.push_async_callback(self._supervisor.stop)
            stack.push_async_callback(self._client.close)
            self._follow(self._store.holder.current)
            self._store.holder.subscribe(self._follow)
            self._state = GatewayState(
                snapshot_holder=self._store.holder,
                leases=self._store.leases,
                ledger=self._store.ledger,
                engine=self._client,
                engine_lives=self._lives,
                settings=HttpSettings(
                    max_body_bytes=settings.max_body_bytes,
                    early_headers_after=settings.early_headers_after,
                    default_max_tokens=settings.default_max_tokens,
                    process_above_bytes=settings.process_above_bytes,
                    prepare_team_bytes=settings.prepare_team_bytes,
                    prepare_total_bytes=settings.prepare_total_bytes,
                    prepare_waiting_requests=settings.prepare_waiting_requests,
                    prepare_wait_seconds=settings.prepare_wait_seconds,
                    prepare_run_seconds=settings.prepare_run_seconds,
                    prepare_idle_seconds=settings.prepare_idle_seconds,
                    prepare_memory_bytes=settings.prepare_memory_bytes,
                    store_lock_grace=settings.store_lock_grace,
                ),
                store_lost_seconds=lambda: self._store.lock.lost_seconds,
            )
            stack.push_async_callback(self._state.preparation.stop)
            self._announcement = _Announcement(
                url,
                url_of(admin_sockets, settings.admin_host),
                str(settings.data_dir),
            )
            self._token = lock.admin_token(settings.data_dir)
            self._metrics = GatewayMetrics(self._state, self._store.leases, self._store.ledger)
            refusals = RefusalLog(settings.refusal_lines_per_minute)
            self._admin_app = admin_app(
                AdminState(
                    token=self._token,
                    refusals=refusals,
                    database=self._store.database,
                    snapshot_holder=self._store.holder,
                    status=self._status,
                    metrics=self._metrics.render,
                    flush=self._store.ledger.flush,
                    settings=as_rows(settings),
                    hello=lambda: self._client.hello if self._client.is_ready else None,
                )
            )
            self._files = raise_file_limit()
            public = self._server(
                public_app(self._state, refusals),
                max(1, min(settings.max_connections, self._files - RESERVED_FILES)),
                on_refusal=wire_refusals(refusals, "public", self._state.refused),
            )
            admin = self._server(
                self._admin_app,
                ADMIN_CONNECTIONS_MAX,
                head_seconds=ADMIN_HEAD_SECONDS,
                on_refusal=wire_refusals(refusals, "admin"),
            )
            await self._serve(public, public_sockets, admin, admin_sockets)

    def _make_engine(self) -> EngineSupervisor | EngineFollower:
        settings = self._settings
        pause_max = settings.engine_restart_pause_max
        self._lives = EngineLives(
            short_life_seconds=settings.engine_short_life,
            short_lives_max=settings.engine_short_lives_max,
            # Looking for an engine that somebody else starts costs nothing, so the pause between looks stays short.
            pause_seconds_max=min(pause_max, FOLLOWER_PAUSE_SECONDS_MAX) if settings.engine_socket else pause_max,
        )
        if settings.engine_socket:
            self._client = EngineClient(settings.engine_socket, on_samples=self._book_samples)
            return EngineFollower(self._lives, self._connect, self._client.wait_closed)
        path = socket_path_for(settings.data_dir)
        self._client = EngineClient(path, on_samples=self._book_samples)
        return EngineSupervisor(engine_config(settings), path, self._lives, self._connect, self._client.close)

    def _server(
        self, app: Any, max_connections: int, *, head_seconds: float = HEAD_SECONDS, on_refusal: OnRefusal
    ) -> HttpServer:
        settings = self._settings
        return make_server(
            app,
            keep_alive_timeout=settings.keep_alive_timeout,
            drain_timeout=settings.drain_timeout,
            max_connections=max_connections,
            head_seconds=head_seconds,
            on_refusal=on_refusal,
        )

    async def _serve(self, public: HttpServer, public_sockets: Any, admin: HttpServer, admin_sockets: Any) -> None:
        public_task = asyncio.create_task(public.serve(public_sockets), name="public")
        admin_task = asyncio.create_task(admin.serve(admin_sockets), name="admin")
        engine_task = asyncio.create_task(self._supervisor.run(), name="engine")
        stop_task = asyncio.create_task(self._stop.wait(), name="stop")
        trim_task = asyncio.create_task(self._keep_trimmed(public), name="trim")
        # This task ends when another gateway has taken the store. Then this gateway ends too.
        lock_task = asyncio.create_task(self._store.lock.watch(), name="store-lock")
        info = {"pid": os.getpid(), "url": self._announcement.url, "admin_url": self._announcement.admin_url}
        lock.write_server_info(self._settings.data_dir, info)
        if not self._as_json:
            socket = self._settings.engine_socket
            _say(f"connecting to {socket} ..." if socket else f"loading {self._settings.model} ...")
        everything = {public_task, admin_task, engine_task, stop_task, lock_task}
        try:
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(public, public_task)
        finally:
            for task in (engine_task, stop_task, trim_task, lock_task):
                task.cancel()
            public.should_exit = admin.should_exit = True
            tasks = (public_task, admin_task, engine_task, stop_task, trim_task, lock_task)
            endings = await asyncio.gather(*tasks, return_exceptions=True)
        for ending in endings:
            if isinstance(ending, Exception):
                raise ending

    async def _keep_trimmed(self, public: HttpServer) -> None:
        """Give memory back after a flood of requests. `public` counts connections and answers."""
        await process_memory.keep_trimmed(
            lambda: public.num_changes,
            lambda: self._client.num_streams > 0,
        )

    async def _drain(self, public: HttpServer, public_task: "asyncio.Task[None]") -> None:
        """Let running requests end by themselves for `drain_timeout`, end the rest, and wait until every row is
        closed."""
        self._state.is_draining = True
        lock.remove_server_info(self._settings.data_dir)
        open_at_start = self._client.num_streams
        if open_at_start:
            _log.info("draining %d requests for up to %.0f s", open_at_start, self._settings.drain_timeout)
        timer = asyncio.get_running_loop().call_later(self._settings.drain_timeout, self._state.end_streams)
        public.should_exit = True
        await public_task
        timer.cancel()
        deadline = time.monotonic() + BOOKING_SECONDS
        while self._store.ledger.num_open and time.monotonic() < deadline:  # noqa: ASYNC110  the ledger has no event
            await asyncio.sleep(0.02)

    async def _connect(self) -> None:
        """Called when the engine listens: greet it; on the first connection, load the tokenizer and announce the
        server.

        Raises EngineStartError.
        """
        try:
            hello = await self._client.connect()
        except EngineDied as error:
            raise EngineStartError(error.message) from error
        if self._state.tokenizer is None:
            try:
                self._state.tokenizer = await asyncio.to_thread(ModelTokenizer.load, hello.model)
            except (OSError, ValueError) as error:
                raise EngineStartError(f"the tokenizer of {hello.model.path} cannot be used: {error}") from error
            await self._announce(hello)
        about: dict[str, object] = {"engine": hello.engine_id, "epoch": hello.epoch, "model": hello.model.name}
        if hello.is_simulated:
            about["simulated"] = True
        _log.info("engine ready", extra={**about, "url": self._announcement.url, "open_files_limit": self._files})

    async def _announce(self, hello: Hello) -> None:
        if self._quickstart:
            self._announcement.key = await self._make_quickstart_key()
        self._announcement.show(hello, self._as_json)

    async def _make_quickstart_key(self) -> str:
        """A fresh key of the team `demo`, which is made if it is not there."""
        import httpx

        from gateway.admin.client import AdminClient
        from gateway.command import EXIT_CONFLICT

        headers = {"authorization": f"Bearer {self._token}"}
        transport = httpx.ASGITransport(self._admin_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            client = AdminClient(http)
            try:
                await client.call("POST", "/admin/v1/teams", body={"name": QUICKSTART_TEAM, "tier": "gold"})
            except CommandError as error:
                if error.exit_code != EXIT_CONFLICT:
                    raise
            answer = await client.call("POST", f"/admin/v1/teams/{QUICKSTART_TEAM}/keys", body={})
        return str(answer["key"])

    def _follow(self, snapshot: Snapshot) -> None:
        """Send the teams of a new snapshot to the engine."""
        self._client.configure_teams(snapshot.team_terms())

    def _book_samples(self, samples: ServiceSamples) -> None:
        self._metrics.add(samples)
        self._store.ledger.add_samples(booking.sample_rows(samples, wall_clock_us()))

    def _status(self) -> dict[str, Any]:
        """What `GET /admin/v1/status` shows."""
        import msgspec

        hello, step = self._client.hello, self._client.latest_step
        reasons = not_ready_reasons(self._state)
        return {
            "version": version("terazi"),
            "pid": os.getpid(),
            "ready": not reasons,
            "degraded": self._state.is_degraded,
            "reasons": reasons,
            "uptime_seconds": round(time.monotonic() - self._started_at, 3),
            "requests_open": self._client.num_streams,
            "ledger_backlog": self._store.ledger.backlog,
            "engine_restarts": self._lives.num_restarts,
            **engine_document(self._state),
            "engine": None if hello is None else msgspec.to_builtins(hello),
            "step": None
            if step is None
            else {
                "running": step.num_running,
                "waiting": step.num_waiting,
                "swapped": step.num_swapped,
                "dropped": step.num_dropped,
                "free_blocks": step.num_free_blocks,
                "free_host_blocks": step.num_free_host_blocks,
                "duration_us": step.duration_us,
            },
            **self._metrics.summary(),
        }
