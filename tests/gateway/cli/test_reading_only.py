"""Commands that read: they make nothing, whatever name they are given, and need no more than to read."""

import asyncio
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.lock import DataDirLock
from tenants.database import Database, sqlite_url
from tenants.errors import StoreUnavailable
from tests.support.other_user import as_nobody

REPORTS = [["usage", "report", "--json"], ["fairness", "report", "--json"]]
LISTS = [["team", "list", "--json"], ["key", "list", "--json"], ["tier", "list", "--json"]]
ONES = [["team", "show", "search", "--json"], ["tier", "show", "gold", "--json"], ["quota", "show", "search", "--json"]]
READS = [*REPORTS, *LISTS, *ONES]


def run(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(data_dir)])


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped server's data directory, with one team."""
    path = tmp_path_factory.mktemp("seed") / "data"
    assert run(path, "team", "create", "search").exit_code == 0
    assert run(path, "key", "create", "search").exit_code == 0
    for arguments in READS:  # so that all modules are loaded while we may read them
        assert run(path, *arguments).exit_code == 0
    return path


@pytest.fixture
def copy(seed: Path) -> Iterator[Path]:
    """A copy that everybody may read and nobody may write, the directory neither."""
    with tempfile.TemporaryDirectory(prefix="terazi-ro-") as name:
        Path(name).chmod(0o755)
        path = shutil.copytree(seed, Path(name) / "copy")
        for file in path.iterdir():
            file.chmod(0o444)
        path.chmod(0o555)
        yield path
        path.chmod(0o755)


def state(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in a directory: times, modes and bytes."""
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        for path in directory.iterdir()
        if path.is_file()
    }


@pytest.mark.case("U10")
@pytest.mark.parametrize("arguments", READS)
def test_a_mistyped_directory_is_not_made(tmp_path: Path, arguments: list[str]) -> None:
    for directory in (tmp_path / "typo", tmp_path):
        done = run(directory, *arguments)
        assert done.exit_code == 3
        assert json.loads(done.stdout)["error"]["code"] == "not_found"
        assert done.stderr.startswith(f"terazi: there is no database in {directory}: ")
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("U10")
def test_config_show_makes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path / "typo", "config", "show").exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("U10")
def test_reads_of_a_real_directory_change_nothing(seed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    shutil.copy(seed / "terazi.db", directory)  # no pepper, no token, no lock
    before = state(directory)
    for arguments in READS:
        assert run(directory, *arguments).exit_code == 0
    assert state(directory) == before


@pytest.mark.case("U10")
def test_reads_do_not_upgrade_a_database(seed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    shutil.copy(seed / "terazi.db", directory)
    with sqlite3.connect(directory / "terazi.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    connection.close()
    before = state(directory)
    done = run(directory, "team", "list")
    assert done.exit_code == 6 and "schema 0001" in done.stderr and "terazi db upgrade" in done.stderr
    assert state(directory) == before


def test_reads_do_not_wait_for_a_lock(seed: Path) -> None:
    with DataDirLock(seed):
        for arguments in READS:
            assert run(seed, *arguments).exit_code == 0


@pytest.mark.case("H08", "U11")
@pytest.mark.parametrize("arguments", READS)
def test_a_copy_that_may_only_be_read_is_reported(copy: Path, arguments: list[str]) -> None:
    before = state(copy)
    with as_nobody():
        done = run(copy, *arguments)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == "" and json.loads(done.stdout)
    assert state(copy) == before


@pytest.mark.case("U11")
def test_a_user_who_may_only_read_sees_a_running_servers_rows(copy: Path) -> None:
    copy.chmod(0o755)
    (copy / "terazi.db").chmod(0o644)
    with as_nobody():
        before = json.loads(run(copy, "team", "list", "--json").stdout)["data"]
    server = sqlite3.connect(copy / "terazi.db")
    try:
        server.execute("UPDATE teams SET name = 'renamed'")
        server.commit()  # in the WAL alone
        copy.chmod(0o555)
        with as_nobody():
            after = json.loads(run(copy, "team", "list", "--json").stdout)["data"]
            assert run(copy, *REPORTS[0]).exit_code == 0
    finally:
        copy.chmod(0o755)
        server.close()
    assert ([team["name"] for team in before], [team["name"] for team in after]) == (["search"], ["renamed"])


def _leave_a_wal(copy: Path) -> None:
    """What a killed server leaves, less the file that only lives while the database is open."""
    copy.chmod(0o755)
    (copy / "terazi.db").chmod(0o644)
    left = sqlite3.connect(copy / "terazi.db")
    left.execute("UPDATE teams SET name = 'renamed'")
    left.commit()
    wal = (copy / "terazi.db-wal").read_bytes()
    left.close()
    (copy / "terazi.db-wal").write_bytes(wal)
    (copy / "terazi.db-wal").chmod(0o444)
    (copy / "terazi.db").chmod(0o444)
    copy.chmod(0o555)


@pytest.mark.case("U11", "H08")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("terazi.db", "This user may not read {copy}/terazi.db: it lacks read permission."),
        ("terazi.db-wal", "This user may not read {copy}/terazi.db-wal: it lacks read permission."),
        ("wal without shm", "{copy}/terazi.db-wal has rows that a stopped server left, and reading them needs write"),
        ("directory", "{copy}/"),
    ],
)
@pytest.mark.parametrize("arguments", [REPORTS[0], LISTS[0]])
def test_a_missing_permission_is_named(copy: Path, what: str, said: str, arguments: list[str]) -> None:
    if "wal" in what:
        _leave_a_wal(copy)
    if what == "directory":
        copy.chmod(0)
    elif what in os.listdir(copy):
        (copy / what).chmod(0)
    with as_nobody():
        done = run(copy, *arguments)
    assert done.exit_code in (1, 5)
    assert done.stderr.count("\n") == 1 and said.format(copy=copy) in done.stderr
    assert "upgrade" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.case("H08")
def test_a_copy_that_changes_under_the_reader_is_said(copy: Path) -> None:
    async def read() -> None:
        with as_nobody():
            database = Database.read_only(sqlite_url(copy / "terazi.db"))
            async with database.session() as connection:
                await connection.exec_driver_sql("SELECT 1 FROM teams")
        with pytest.raises(StoreUnavailable, match="began to write"):
            async with database.session():
                os.utime(copy / "terazi.db", ns=(1, 1))
        await database.dispose()

    asyncio.run(read())
