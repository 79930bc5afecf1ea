"""Servers for end-to-end tests; whatever a test does, its processes end with it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.e2e.server import Server


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is made, once for all servers of this run."""
    return tmp_path_factory.mktemp("terazi-cache")


@pytest.fixture
def make_server(tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Server]]:
    """Data directories with servers on them (not yet started)."""
    made: list[Server] = []

    def make(name: str = "data") -> Server:
        made.append(Server(tmp_path / name, cache_dir))
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Server]:
    """One running server, shared by the tests that leave it running."""
    server = Server(tmp_path_factory.mktemp("shared") / "data", cache_dir)
    try:
        yield server.start()
    finally:
        server.kill()
