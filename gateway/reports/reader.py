"""Reports straight from the database, on a read-only connection and without the lock, whether or not a server runs."""

import contextlib
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.command import EXIT_ERROR, EXIT_NOT_FOUND, EXIT_USAGE, CommandError
from gateway.settings.values import load
from tenants import reports, teams
from tenants.clock import wall_clock_us
from tenants.database import Database, sqlite_path
from tenants.disk import disk_trouble
from tenants.errors import Invalid, NotFound, StoreUnavailable, TenantError
from tenants.reports.periods import DEFAULT_TIME_ZONE, Period, parse_period
from tenants.store_url import without_secrets

_MISSING = re.compile(r"no such (table|column)|does not exist")


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports of one store over one period."""

    database: Database
    period: Period

    async def usage(self, by: Sequence[str] = ("team",), team: str | None = None) -> dict[str, Any]:
        """See `tenants.reports.usage_report`. Raises NotFound for an unknown team."""
        async with self.database.session() as connection:
            if team is not None:
                await teams.get_team(connection, team)
            return await reports.usage_report(connection, self.period, by, team=team)

    async def fairness(self) -> dict[str, Any]:
        """See `tenants.reports.fairness_report`."""
        async with self.database.session() as connection:
            return await reports.fairness_report(connection, self.period)

    async def series(self) -> dict[str, Any]:
        """See `tenants.reports.service_series`."""
        async with self.database.session() as connection:
            return await reports.service_series(connection, self.period)


@contextlib.asynccontextmanager
async def open_reports(
    data_dir: Path,
    from_text: str | None = None,
    to_text: str | None = None,
    *,
    zone: str = DEFAULT_TIME_ZONE,
    environment: Mapping[str, str] = os.environ,
) -> AsyncIterator[Reports]:
    """Raises CommandError for a store that is not there, cannot be read or is of another version, or a bad period."""
    from sqlalchemy.exc import SQLAlchemyError

    url = load({"data_dir": data_dir}, environment).database_url
    try:
        path = sqlite_path(url)
        # Opening a missing SQLite file would make an empty one.
        if path is not None and not path.exists():
            raise CommandError(
                f"there is no database in {path.absolute().parent}: no server has run there",
                EXIT_NOT_FOUND,
                "not_found",
            )
        period = parse_period(from_text, to_text, wall_clock_us(), zone)
        database = Database.read_only(url)
    except Invalid as error:
        raise CommandError(error.message, EXIT_USAGE, error.code) from None
    try:
        yield Reports(database, period)
    except Invalid as error:
        raise CommandError(error.message, EXIT_USAGE, error.code) from None
    except NotFound as error:
        raise CommandError(error.message, EXIT_NOT_FOUND, error.code) from None
    except StoreUnavailable:
        raise
    except TenantError as error:
        raise CommandError(error.message, EXIT_ERROR, error.code) from None
    except SQLAlchemyError as error:
        why = disk_trouble(error, path)
        if why is not None:
            raise CommandError(why, EXIT_ERROR) from None
        reason = (str(getattr(error, "orig", None) or error).splitlines() or [type(error).__name__])[0]
        reason = without_secrets(reason, url)
        # An upgrade makes tables and columns; it gives nobody a permission and mends no file.
        advice = "; try terazi db upgrade" if _MISSING.search(reason) else ""
        raise CommandError(f"the database cannot be read: {reason}{advice}", EXIT_ERROR) from None
    finally:
        await database.dispose()
