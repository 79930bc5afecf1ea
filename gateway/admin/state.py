"""The parts that the admin API is built on, as one value for all its calls, and how calls read a query."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from engine.wire.messages import Hello
from gateway.admin import schema
from gateway.errors import BadRequest
from gateway.refusals import RefusalLog
from tenants.clock import wall_clock_us
from tenants.database import Database
from tenants.snapshot import SnapshotHolder

TOKEN_LEN_MIN = 16


def _no_server() -> dict[str, Any]:
    return {"ready": False, "reasons": ["no server runs"]}


def _no_hello() -> Hello | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminState:
    """The parts that the admin app is built on. Raises ValueError when `token` is too short.

    `status` returns one JSON-able mapping with at least `ready` (bool); `/readyz` shows a part of it. `flush` waits
    until the ledger's closed rows are in SQL, so that a report contains the requests that ended before it.
    """

    token: str
    database: Database
    snapshot_holder: SnapshotHolder
    status: Callable[[], Mapping[str, Any]] = _no_server
    metrics: Callable[[], bytes] = bytes  # nothing
    flush: Callable[[], Awaitable[None]] | None = None
    settings: Sequence[Mapping[str, Any]] = ()  # settings of the running server, as `config show` prints them
    hello: Callable[[], Hello | None] = _no_hello  # the connected engine's greeting, for maximum pauses
    now_us: Callable[[], int] = wall_clock_us
    refusals: RefusalLog | None = None  # logs refused calls

    def __post_init__(self) -> None:
        if len(self.token) < TOKEN_LEN_MIN:
            raise ValueError(f"the admin token must have at least {TOKEN_LEN_MIN} characters")

    def __repr__(self) -> str:
        return "AdminState()"  # it holds the token


def query_of(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters. Raises BadRequest for a parameter that is not in `known` or is given twice."""
    pairs = request.query_params.multi_items()
    found = dict(pairs)
    schema.check_names(found, known, "parameter")
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"The query parameter {twice} is given twice; give it once.", code="invalid_value")
    return found
