"""Fixtures of the store's tests beside those of all tests: a PostgreSQL server."""

from collections.abc import Iterator

import pytest

from tests.support.tenants.postgres import PostgresServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server for the tests of one file."""
    with running_server() as server:
        yield server
