"""Listening sockets, and the uvicorn servers on them. We bind the sockets, so that a taken port is one clear line."""

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
# File descriptors kept free for the database, the journal, the engine and admin connections.
RESERVED_FILES = 64
_BIND_ATTEMPTS = 20  # for port 0: the free IPv4 port that we get may be taken on IPv6


class ListenError(Exception):
    """We cannot listen on an address. The text names the address and the reason."""


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit. Returns how many files to plan with, at most FILES_MAX."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # The kernel may refuse, for example a hard limit above fs.nr_open. The soft limit then stays.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return FILES_MAX if soft == resource.RLIM_INFINITY else min(soft, FILES_MAX)


class ConnectionCount:
    """Counts how often a connection of one server was made or lost."""

    def __init__(self) -> None:
        self.changes = 0


def limited_protocol(
    max_connections: int,
    head_seconds: float = HEAD_SECONDS,
    count: ConnectionCount | None = None,
    on_refusal: OnRefusal | None = None,
) -> type[HttpProtocol]:
    """An HTTP protocol class that refuses connections above `max_connections`.

    So files are left for the database, the journal and the admin listener. A connection that has not sent a whole head
    within `head_seconds` is closed. `on_refusal` is called for each refusal that happens before the app sees a request.
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
    """A uvicorn server that does not handle signals; `gateway.serve` does."""

    def __init__(self, config: uvicorn.Config, count: ConnectionCount) -> None:
        super().__init__(config)
        self._count = count

    @property
    def num_changes(self) -> int:
        """Connections made, connections lost and requests answered so far.

        The number changes whenever something happens.
        """
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
    """A server for one app. Times are seconds; idle connections stay open for `keep_alive_timeout`."""
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
        # At drain_timeout every stream gets an error event. A client still connected 5 s later has not read it.
        timeout_graceful_shutdown=int(drain_timeout) + 5,
    )
    return HttpServer(config, count)


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for host:port. `localhost` is 127.0.0.1 and ::1; `::` is every address of both families.

    Port 0 takes one free port for all sockets. Raises ListenError.
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
    """The URL by which a client on this machine reaches `sockets`, which were bound to `host`."""
    port = sockets[0].getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
