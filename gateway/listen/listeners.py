"""Sockets and the uvicorn servers on them: bound by us, so that a taken port is one clear line, and run in one loop."""

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from gateway.errors import Unavailable
from gateway.listen.protocol import HEAD_SECONDS, HttpProtocol, OnRefusal

FILES_MAX = 65536
# Database, journal, engine, admin connections.
RESERVED_FILES = 64
_BIND_ATTEMPTS = 20  # a free IPv4 port may be taken on IPv6


class ListenError(Exception):
    """An address that cannot be listened on; the text names it and the fix."""


def raise_file_limit() -> int:
    """Allow as many open files as this process may have, and return that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # What the kernel itself refuses (a hard limit above fs.nr_open) leaves the soft limit as it is.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return FILES_MAX if soft == resource.RLIM_INFINITY else min(soft, FILES_MAX)


class ConnectionCount:
    """How often a connection of one server was made or lost."""

    def __init__(self) -> None:
        self.changes = 0


def limited_protocol(
    max_connections: int,
    head_seconds: float = HEAD_SECONDS,
    count: ConnectionCount | None = None,
    on_refusal: OnRefusal | None = None,
) -> type[HttpProtocol]:
    """The HTTP protocol that turns further connections away, so that files are left for database, journal and admin.

    A connection that has not sent a whole head within `head_seconds` is closed. `on_refusal` is told of what is refused
    before the app sees it.
    """
    counted = count or ConnectionCount()

    class LimitedProtocol(HttpProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.head_seconds = head_seconds
            self.on_refusal = on_refusal

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            counted.changes += 1
            if len(self.connections) >= max_connections:
                self.transport = transport
                self._refuse(Unavailable("The server has no room for another connection.", retry_after_seconds=2))
                return
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            counted.changes += 1
            super().connection_lost(exc)

    return LimitedProtocol


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to `gateway.serve`."""

    def __init__(self, config: uvicorn.Config, count: ConnectionCount) -> None:
        super().__init__(config)
        self._count = count

    @property
    def num_changes(self) -> int:
        """Connections made, connections lost and requests answered so far: a number that moves when anything does."""
        return self._count.changes + self.server_state.total_requests

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_server(
    app: Any,
    *,
    keep_alive_timeout: float,
    drain_timeout: float,
    max_connections: int = FILES_MAX,
    head_seconds: float = HEAD_SECONDS,
    on_refusal: OnRefusal | None = None,
) -> HttpServer:
    """A server for one app. Its clients' idle connections stay open for `keep_alive_timeout` seconds."""
    count = ConnectionCount()
    config = uvicorn.Config(
        app,
        http=limited_protocol(max_connections, head_seconds, count, on_refusal),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(keep_alive_timeout),
        # Streams get an error event at drain_timeout; what is left after this has not even read that.
        timeout_graceful_shutdown=int(drain_timeout) + 5,
    )
    return HttpServer(config, count)


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for host:port; `localhost` is 127.0.0.1 and ::1, `::` is every address of both families.

    Port 0 takes one free port for all of them. Raises ListenError.
    """
    if host != "localhost":
        return [_bind_one(host, port)]
    for attempt in range(_BIND_ATTEMPTS):
        first = _bind_one("127.0.0.1", port)
        try:
            return [first, _bind_one("::1", first.getsockname()[1])]
        except OSError:
            return [first]  # no IPv6 on this machine
        except ListenError:
            first.close()
            if port or attempt == _BIND_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _bind_one(host: str, port: int) -> socket.socket:
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {shown}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and host == "::1":
            raise
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"cannot listen on {shown}: the port is taken; choose another one") from None
        raise ListenError(f"cannot listen on {shown}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def url_of(sockets: list[socket.socket], host: str) -> str:
    """How a client on this machine reaches them."""
    port = sockets[0].getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
