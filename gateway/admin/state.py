"""What the admin API stands on, handed to its calls as one value, and what they all read of a request."""

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
    """What the admin app stands on.

    `status` returns one JSON-able mapping with at least `ready` (bool); `/readyz` shows `ready`, `degraded` and
    `reasons` of it. `flush` waits until the ledger's closed rows are in SQL, so a report sees the request before it.
    """

    token: str
    database: Database
    snapshot_holder: SnapshotHolder
    status: Callable[[], Mapping[str, Any]] = _no_server
    metrics: Callable[[], bytes] = bytes  # nothing
    flush: Callable[[], Awaitable[None]] | None = None
    settings: Sequence[Mapping[str, Any]] = ()  # the running server's, as `config show` prints them
    hello: Callable[[], Hello | None] = _no_hello  # of the connected engine: maximum pauses follow from it
    now_us: Callable[[], int] = wall_clock_us
    refusals: RefusalLog | None = None  # logs what is refused

    def __post_init__(self) -> None:
        if len(self.token) < TOKEN_LEN_MIN:
            raise ValueError(f"the admin token must have at least {TOKEN_LEN_MIN} characters")

    def __repr__(self) -> str:
        return "AdminState()"  # it holds the token


def query_of(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters. Raises BadRequest for one that is unknown or given twice."""
    pairs = request.query_params.multi_items()
    found = dict(pairs)
    schema.check_names(found, known, "parameter")
    if len(found) != len(pairs):
        raise BadRequest("A query parameter is given twice.", code="invalid_value")
    return found
