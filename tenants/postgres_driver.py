"""asyncpg, but what goes wrong before there is a connection is one of our errors.

SQLAlchemy wraps a driver's errors only once it has a connection. A wrong password, a database that is not there or a
server that does not answer would reach the caller as the driver's own exception, and the operator as a traceback.
"""

from typing import Any

from tenants.errors import StoreUnavailable


async def connect(*arguments: Any, **options: Any) -> Any:
    """What SQLAlchemy calls in place of asyncpg.connect. Raises StoreUnavailable, which never shows the password."""
    import asyncpg  # only those who use PostgreSQL have it

    try:
        return await asyncpg.connect(*arguments, **options)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        host, port = options.get("host") or "the default host", options.get("port")
        where = f"{host}:{port}" if port else str(host)
        lines = str(error).strip().splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        raise StoreUnavailable(f"Cannot connect to PostgreSQL at {where}: {reason}.") from error
