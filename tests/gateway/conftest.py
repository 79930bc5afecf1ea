"""Async tests of the gateway run on asyncio, through anyio's own pytest plugin."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
