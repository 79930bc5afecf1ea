"""The errors of this package. The gateway maps each onto an HTTP status.

TenantError
├── Invalid             a value that can never be right (400)
├── NotFound            no such team, key or tier (404)
├── Conflict            the name is taken, or the state has changed (409)
├── Denied              the caller's key opens nothing (401)
│   ├── InvalidKey      the key is unknown, malformed or wrong: all three look the same
│   ├── KeyRevoked      raised only for a caller who knew the secret
│   │   └── TeamArchived    the key is good, but its team is archived
│   └── KeyExpired      raised only for a caller who knew the secret
├── LimitExceeded       the team has reached a limit of its own (429)
└── StoreUnavailable    database or journal cannot be read or written (503)
    ├── SchemaTooNew    the database was made by a newer Terazi
    ├── MigrationFailed one step of the schema's upgrade failed
    ├── StoreInUse      another gateway, or a command, holds the store
    ├── StoreUnreachable  the database server does not answer, or refuses this user
    └── StoreUnreadable   this user may not read the database's files
"""


class TenantError(Exception):
    """Base of this package's errors. `code` is an `error.code` of the reference; `message` never holds a secret."""

    code = "tenant_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class Invalid(TenantError):
    """A value outside what the reference allows. `param` names the field."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class NotFound(TenantError):
    """The named thing does not exist."""

    code = "not_found"


class Conflict(TenantError):
    """The name is taken, or the thing is in use."""

    code = "conflict"


class Denied(TenantError):
    """The caller's key does not allow the call."""

    code = "denied"


class InvalidKey(Denied):
    """The key is unknown, malformed or wrong. All three have one message, so that a guesser learns nothing from it."""

    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("Incorrect API key provided.")


class KeyRevoked(Denied):
    """The secret was right, but the key has been revoked (or, in a subclass, its team archived)."""

    code = "key_revoked"


class KeyExpired(Denied):
    """The secret was right, but the key has expired."""

    code = "key_expired"


class TeamArchived(KeyRevoked):
    """The secret was right and the key is good, but its team is archived. An operator can restore the team."""

    code = "team_archived"

    def __init__(self, team: str) -> None:
        super().__init__(
            f"Team {team} is archived, so its API keys are refused. An operator can restore it: {how_to_restore(team)}"
        )


def how_to_restore(team: str) -> str:
    """The command that brings an archived team back."""
    return f"terazi team set {team} --restore"


_LIMIT_WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent_limit": "concurrent requests",
}


class LimitExceeded(TenantError):
    """A team has reached one of its own limits.

    `limit` is "requests", "tokens" or "concurrent_limit", and is the error code too. `hard` is the limit's value,
    `used` what counts against it now, `requested` what this request would add. `retry_after_seconds` is when it would
    fit.
    """

    def __init__(
        self,
        *,
        limit: str,
        scope: str,
        name: str,
        hard: int,
        used: int,
        requested: int,
        retry_after_seconds: float,
    ) -> None:
        super().__init__(
            f"Team {name} has reached its limit of {hard} {_LIMIT_WORDS.get(limit, limit)}: "
            f"{used} used, {requested} requested.",
            code=limit,
        )
        self.limit = limit
        self.scope = scope
        self.name = name
        self.hard = hard
        self.used = used
        self.requested = requested
        self.retry_after_seconds = retry_after_seconds

    @property
    def never_fits(self) -> bool:
        """True when waiting cannot help: the request alone is larger than the limit."""
        return self.requested > self.hard


class StoreUnavailable(TenantError):
    """The database or the journal cannot be read or written now."""

    code = "store_unavailable"


class SchemaTooNew(StoreUnavailable):
    """The database has a revision that this version does not know."""

    code = "schema_too_new"


class MigrationFailed(StoreUnavailable):
    """A migration has failed, and the database is as it was before. The message names the migration and the cause."""

    code = "migration_failed"


class StoreInUse(StoreUnavailable):
    """Another gateway, or a command that writes, holds this store. `holder` names it, a gateway with its address."""

    code = "store_in_use"

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"The store is in use by {holder}. One store serves one gateway at a time: stop that one, "
            "or give this one a store of its own."
        )
        self.holder = holder


class StoreUnreachable(StoreUnavailable):
    """The database server does not answer, or does not let this user in. The message has host and port."""

    code = "store_unreachable"


class StoreUnreadable(StoreUnavailable):
    """This user may not read the database's files. The message names the file and the missing permission."""

    code = "store_unreadable"
