"""The admin API as the CLI calls it: over HTTP to the running server, or the same app in this process.

Without a server, a command that writes holds the data directory's lock while it runs. So there is always one writer,
and one code path. A command that only reads opens the database read-only and makes no file, even when the directory's
name is mistyped.
"""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import lock
from gateway.command import (
    EXIT_CONFLICT,
    EXIT_DENIED,
    EXIT_ERROR,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    CommandError,
)
from gateway.settings.values import load

if TYPE_CHECKING:
    import httpx

    from gateway.admin.state import AdminState

_EXIT_OF_STATUS = {400: EXIT_USAGE, 401: EXIT_DENIED, 403: EXIT_DENIED, 404: EXIT_NOT_FOUND, 409: EXIT_CONFLICT}
_EXIT_OF_STATUS |= {413: EXIT_USAGE, 422: EXIT_USAGE, 503: EXIT_UNREACHABLE}
TIMEOUT_SECONDS = 30.0
# How long to wait for the lock's holder: a server publishes its addresses soon, a command ends in about a second.
LOCKED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Makes calls on the admin API. A refusal becomes a CommandError with the exit code for its HTTP status."""

    http: "httpx.AsyncClient"

    async def call(
        self, method: str, path: str, *, body: Any = None, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make one call. Returns the JSON object of the answer; {} when the answer has no body. Raises CommandError."""
        import httpx

        try:
            answer = await self.http.request(method, path, json=body, params=params)
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise CommandError(f"the server does not answer: {what}", EXIT_UNREACHABLE, "unreachable") from None
        try:
            content = answer.json()
        except ValueError:
            content = {}
        if answer.is_success and isinstance(content, dict):
            return content
        error_body = content.get("error", {}) if isinstance(content, dict) else {}
        message = error_body.get("message") or f"the server answered {answer.status_code}"
        code = error_body.get("code") or "error"
        raise CommandError(message, _EXIT_OF_STATUS.get(answer.status_code, EXIT_ERROR), code)


@contextlib.asynccontextmanager
async def open_admin(data_dir: Path) -> AsyncIterator[AdminClient]:
    """The admin API of this data directory, for calls that write.

    Raises CommandError, DataDirLocked, DataDirUnusable, SettingsError or TenantError.
    """
    hold = lock.DataDirLock(data_dir)
    deadline = time.monotonic() + LOCKED_SECONDS
    while True:
        try:
            hold.acquire()
            break
        except lock.DataDirLocked:
            info = lock.read_server_info(data_dir)
            if info is not None:
                async with _running_server(data_dir, info) as client:
                    yield client
                return
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)
    try:
        async with _in_process(data_dir) as client:
            yield client
    finally:
        hold.release()


@contextlib.asynccontextmanager
async def open_admin_to_read(data_dir: Path) -> AsyncIterator[AdminClient]:
    """The admin API of this data directory, for GET calls. Makes and locks nothing.

    Raises CommandError, DataDirUnusable, SettingsError or TenantError.
    """
    info = running_server(data_dir)
    if info is not None:
        async with _running_server(data_dir, info) as client:
            yield client
        return
    from gateway.store import reading_admin_state

    token = secrets.token_urlsafe(32)  # only this process uses the token
    async with reading_admin_state(load({"data_dir": data_dir}, os.environ), token) as state, _asked(state) as client:
        yield client


def running_server(data_dir: Path) -> dict[str, Any] | None:
    """Addresses and process id of the server of this data directory; None when no server runs."""
    info = lock.read_server_info(data_dir)
    return info if info is not None and lock.is_held(data_dir / "lock") else None


@contextlib.asynccontextmanager
async def _running_server(data_dir: Path, info: Mapping[str, Any]) -> AsyncIterator[AdminClient]:
    import httpx

    headers = {"authorization": f"Bearer {lock.read_admin_token(data_dir)}"}
    # trust_env=False: a proxy from the environment must never see the admin token.
    async with httpx.AsyncClient(
        base_url=info["admin_url"], headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False
    ) as http:
        yield AdminClient(http)


@contextlib.asynccontextmanager
async def _in_process(data_dir: Path) -> AsyncIterator[AdminClient]:
    from gateway.store import offline_admin_state

    token = lock.admin_token(data_dir)
    settings = load({"data_dir": data_dir}, os.environ)
    async with offline_admin_state(settings, token) as state, _asked(state) as client:
        yield client


@contextlib.asynccontextmanager
async def _asked(state: "AdminState") -> AsyncIterator[AdminClient]:
    """The admin app on `state`, in this process."""
    import httpx

    from gateway.admin.app import admin_app

    headers = {"authorization": f"Bearer {state.token}"}
    transport = httpx.ASGITransport(admin_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
        yield AdminClient(http)


def call(
    data_dir: Path, method: str, path: str, *, body: Any = None, params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Make one call for a command, and return the JSON object of the answer. A GET makes no file.

    Raises what `open_admin` and `AdminClient.call` raise.
    """
    opened = open_admin_to_read if method == "GET" else open_admin

    async def once() -> dict[str, Any]:
        async with opened(data_dir) as client:
            return await client.call(method, path, body=body, params=params)

    return asyncio.run(once())
