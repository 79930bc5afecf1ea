"""The tenants as admission sees them: one frozen value in memory, replaced whole after each change.

Admission never waits for SQL. While the database is away the last snapshot stays in use, so no good key is refused for
that reason. The next request sees each change, because a call that writes reloads the snapshot before it answers.
"""

import asyncio
import hmac
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from sqlalchemy import select

from policies.sequences import TeamTerms
from policies.tiers import Tier
from tenants import key_format, tables
from tenants.clock import epoch_us
from tenants.database import STORE_ERRORS, Database
from tenants.errors import InvalidKey, KeyExpired, KeyRevoked, StoreUnavailable, TeamArchived
from tenants.pepper import Pepper
from tenants.quotas import Limits as Limits

_log = logging.getLogger("terazi.tenants")
_NO_HASH = bytes(32)  # compared when the id is unknown, which then takes as long as a known id


@dataclass(frozen=True, slots=True)
class Identity:
    """The team and project that a key belongs to, with the team's tier and limits."""

    key_id: int
    key_public_id: str
    project_id: int
    project: str
    team_id: int
    team: str
    tier: Tier
    limits: Limits


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key in the snapshot: its identity, and the hash that proves it."""

    identity: Identity
    secret_hmac: bytes
    expires_at_us: int | None
    is_revoked: bool
    is_team_archived: bool = False

    def __repr__(self) -> str:
        return f"KeyEntry({self.identity.key_public_id})"


@dataclass(frozen=True, slots=True)
class KnownTeam:
    """One team that is not archived."""

    team_id: int
    name: str
    tier: Tier
    limits: Limits


class Snapshot:
    """All teams and keys at one moment. Immutable."""

    def __init__(self, pepper: Pepper, keys: Mapping[str, KeyEntry], teams: tuple[KnownTeam, ...], generation: int = 0):
        self._pepper = pepper
        self._keys = MappingProxyType(dict(keys))  # by public id
        self.teams = teams
        self.generation = generation

    def __repr__(self) -> str:
        return f"Snapshot(generation={self.generation}, teams={len(self.teams)}, keys={len(self._keys)})"

    def identify(self, bearer: str, now: datetime) -> Identity:
        """The identity of this key (the text after `Bearer `) at the moment `now`.

        Raises InvalidKey when the key is unknown or wrong, and KeyRevoked, TeamArchived or KeyExpired only when the
        secret was right. The secret is compared in constant time, and against a dummy when the public id is unknown.
        """
        parsed = key_format.parse(bearer)
        if parsed is None:
            raise InvalidKey
        entry = self._keys.get(parsed.public_id)
        expected = _NO_HASH if entry is None else entry.secret_hmac
        matches = hmac.compare_digest(key_format.hash_secret(self._pepper.secret, parsed.secret), expected)
        if entry is None or not matches:
            raise InvalidKey
        if entry.is_revoked:
            raise KeyRevoked(f"API key {parsed.public_id} has been revoked.")
        if entry.is_team_archived:
            raise TeamArchived(entry.identity.team)
        if entry.expires_at_us is not None and epoch_us(now) >= entry.expires_at_us:
            raise KeyExpired(f"API key {parsed.public_id} has expired.")
        return entry.identity

    def owner(self, public_id: str) -> Identity | None:
        """The identity of the key with this public id, also of a revoked key.

        Only for logs, since an id proves nothing.
        """
        entry = self._keys.get(public_id)
        return None if entry is None else entry.identity

    def team_terms(self) -> tuple[TeamTerms, ...]:
        """The terms for the scheduler of every team that is not archived, in order of team id."""
        return tuple(team.tier.terms(team.team_id) for team in self.teams)


Callback = Callable[[Snapshot], Awaitable[None] | None]


class SnapshotHolder:
    """Owns the current snapshot. Every admin write calls `reload`, which calls the subscribers in order."""

    def __init__(self, database: Database, pepper: Pepper) -> None:
        self._database = database
        self._pepper = pepper
        self._callbacks: list[Callback] = []
        self._current = Snapshot(pepper, {}, ())
        self._reloading = asyncio.Lock()
        self.num_failed_reloads = 0

    @property
    def current(self) -> Snapshot:
        """The latest snapshot that could be read."""
        return self._current

    @property
    def pepper(self) -> Pepper:
        """The pepper that the secrets of new keys are hashed with."""
        return self._pepper

    def subscribe(self, callback: Callback) -> None:
        """Call `callback(snapshot)` after each reload. If it returns an awaitable, the reload awaits it."""
        self._callbacks.append(callback)

    async def reload(self) -> Snapshot:
        """Read teams, tiers, quotas and keys anew, and call the subscribers.

        Raises StoreUnavailable when the database cannot be read; the old snapshot then stays.
        """
        # One reload at a time. Of two that overlap, the reload that read first must not replace the newer state.
        async with self._reloading:
            try:
                snapshot = await load_snapshot(self._database, self._pepper)
            except STORE_ERRORS as error:
                self.num_failed_reloads += 1
                raise StoreUnavailable("The database cannot be read; the last known teams and keys stay.") from error
            self._current = snapshot
            for callback in self._callbacks:
                result = callback(snapshot)
                if inspect.isawaitable(result):
                    await result
            return snapshot


async def load_snapshot(database: Database, pepper: Pepper) -> Snapshot:
    """Read teams, tiers, quotas and keys in one transaction. Raises what the database raises."""
    t = tables
    team_query = (
        select(t.teams.c.id, t.teams.c.name, t.teams.c.archived_at_us, *t.TIER_COLUMNS, *t.LIMIT_COLUMNS)
        .select_from(t.teams.join(t.tiers).outerjoin(t.quotas))
        .order_by(t.teams.c.id)
    )
    key_query = select(t.api_keys, t.projects.c.team_id, t.projects.c.name.label("project")).join(t.projects)
    async with database.session() as connection:
        generation = await connection.scalar(select(t.generation.c.value))
        team_rows = (await connection.execute(team_query)).mappings().all()
        key_rows = (await connection.execute(key_query)).mappings().all()
    entries: dict[int, KnownTeam] = {}
    archived: set[int] = set()
    for row in team_rows:
        entries[row["id"]] = KnownTeam(row["id"], row["name"], t.tier_of(row), t.limits_of(row))
        if row["archived_at_us"] is not None:
            archived.add(row["id"])
    keys: dict[str, KeyEntry] = {}
    num_foreign = 0
    for row in key_rows:
        if row["pepper_id"] != pepper.pepper_id:
            num_foreign += 1  # no secret can match a hash that another pepper made
            continue
        team = entries[row["team_id"]]
        identity = Identity(
            key_id=row["id"],
            key_public_id=row["public_id"],
            project_id=row["project_id"],
            project=row["project"],
            team_id=team.team_id,
            team=team.name,
            tier=team.tier,
            limits=team.limits,
        )
        keys[row["public_id"]] = KeyEntry(
            identity,
            row["secret_hmac"],
            row["expires_at_us"],
            is_revoked=row["revoked_at_us"] is not None,
            is_team_archived=team.team_id in archived,
        )
    if num_foreign:
        _log.warning(
            "%d API keys were made with another pepper than %s and cannot be used", num_foreign, pepper.pepper_id
        )
    live = tuple(entry for entry in entries.values() if entry.team_id not in archived)
    return Snapshot(pepper, keys, live, generation or 0)
