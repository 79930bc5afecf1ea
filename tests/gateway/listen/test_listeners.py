"""Listeners: which addresses they take, how they are called, and how long a connection may idle."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.listen.listeners import ListenError, bind, make_server, url_of
from gateway.settings.values import load
from tests.support.gateway.harness import WAIT, FakeClock, clocked, eventually


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.case("D14")
def test_localhost_is_both_loopback_addresses_on_one_port() -> None:
    listeners = bind("localhost", 0)
    try:
        addresses = [listener.getsockname()[:2] for listener in listeners]
        assert addresses[0][0] == "127.0.0.1"
        assert [host for host, _ in addresses[1:]] in (["::1"], [])
        assert len({port for _, port in addresses}) == 1
        assert url_of(listeners, "localhost") == f"http://localhost:{addresses[0][1]}"
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:")])
def test_urls_are_such_that_a_client_here_can_use_them(host: str, shown: str) -> None:
    (listener,) = bind(host, 0)
    with listener:
        assert url_of([listener], host).startswith(shown)
        assert url_of([listener], "::1").startswith("http://[::1]:")


def test_a_taken_port_and_a_foreign_address_are_named(free_port: int) -> None:
    (listener,) = bind("127.0.0.1", free_port)
    with listener:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{free_port}: the port is taken"):
                bind(host, free_port)
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:"):
        bind("192.0.2.1", 0)
    with pytest.raises(ListenError, match="cannot listen on no such host:"):
        bind("no such host", 0)


def test_localhost_on_a_port_that_only_ipv6_has_taken_is_refused(free_port: int) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    (listener,) = bind("::1", free_port)
    with listener, pytest.raises(ListenError, match=r"\[::1\]:"):
        bind("localhost", free_port)


@pytest.mark.case("D09")
def test_the_server_keeps_an_idle_connection_as_long_as_set() -> None:
    """The real server with the default settings, its connection's timers on a clock that is moved."""
    settings = load({}, {})
    assert settings.keep_alive_timeout > 60, "clients' pools keep connections for up to 60 s"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def use_twice_and_idle() -> None:
        clock = FakeClock()
        server = make_server(app, keep_alive_timeout=settings.keep_alive_timeout, drain_timeout=settings.drain_timeout)
        assert (server.config.timeout_graceful_shutdown or 0) > settings.drain_timeout
        server.config.http = clocked(server.config.http, clock)
        listeners = bind("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve(listeners))
        await eventually(lambda: server.started)
        reader, writer = await asyncio.open_connection(*listeners[0].getsockname()[:2])
        for seconds in (0, settings.keep_alive_timeout - 1):
            clock.advance(seconds)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(WAIT):
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
        clock.advance(settings.keep_alive_timeout)
        await eventually(reader.at_eof)
        writer.close()
        server.should_exit = True
        await serving
        for listener in listeners:
            listener.close()

    asyncio.run(use_twice_and_idle())
