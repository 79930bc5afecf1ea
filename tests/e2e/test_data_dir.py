"""What a server leaves in a data directory that others may enter, and what commands say beside it."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tenants.pepper import load_pepper
from tests.support.e2e.server import Server

MakeServer = Callable[..., Server]


def open_files(directory: Path) -> dict[str, str]:
    """The files and directories below that are not their owner's alone, with their modes."""
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in directory.rglob("*")}
    return {str(path.relative_to(directory)): f"{mode:04o}" for path, mode in found.items() if mode & 0o077}


@pytest.mark.case("U12", "U10")
def test_a_server_in_an_open_directory_is_private_and_shows_itself(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    server.data_dir.mkdir()
    server.data_dir.chmod(0o755)
    load_pepper(server.data_dir, {})
    (server.data_dir / "pepper").chmod(0o644)
    steps = server.data_dir / "steps.jsonl"
    # What Kubernetes sets for a Service `terazi-admin` in the same namespace.
    server.environment |= {"TERAZI_STEP_LOG": str(steps), "TERAZI_ADMIN_PORT": "tcp://10.96.0.20:8081"}
    before = os.umask(0o022)
    try:
        server.start("--max-batch-size", "3")
    finally:
        os.umask(before)
    server.make_key()
    assert steps.exists() and (server.data_dir / "terazi.db-wal").exists()
    assert open_files(server.data_dir) == {}
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o755  # the operator's own
    warnings = [line for line in server.log.splitlines() if "pepper" in line]
    assert len(warnings) == 1 and "0644" in warnings[0]

    del server.environment["TERAZI_STEP_LOG"]
    document = server.json("config", "show")
    rows = {row["name"]: row for row in document["settings"]}
    assert document["server"]["pid"] == server.info["pid"]
    assert (rows["max_batch_size"]["value"], rows["max_batch_size"]["source"]) == (3, "flag --max-batch-size")
    assert (rows["step_log"]["value"], rows["step_log"]["source"]) == (str(steps), "environment TERAZI_STEP_LOG")
    assert rows["admin_port"]["source"] == "flag --admin-port"
    text = server.terazi("config", "show").stdout
    assert text.startswith(f"settings of the running server, process {server.info['pid']}\n")
    file = tmp_path / "next.yaml"
    file.write_text("engine: {max_batch_size: 5}\n")
    planned = server.json("config", "show", "--config", str(file))
    assert planned["server"] is None
    assert {row["name"]: row["value"] for row in planned["settings"]}["max_batch_size"] == 5

    assert server.stop() == 0
    assert open_files(server.data_dir) == {}
    after = server.json("config", "show")
    assert after["server"] is None
    assert {row["name"]: row["value"] for row in after["settings"]}["max_batch_size"] == 64


@pytest.mark.case("H32")
def test_a_server_without_its_database_ends_with_6(make_server: MakeServer) -> None:
    server = make_server()
    server.environment["TERAZI_STORE_URL"] = "postgres://u:S3cret@127.0.0.1:1/t?password=S3cret"
    done = server.terazi("serve", "--engine", "sim", "--port", "0", "--admin-port", "0", "--json")
    assert done.returncode == 6
    assert json.loads(done.stdout)["error"]["code"] == "store_unreachable"
    assert done.stderr == "terazi: The database server at 127.0.0.1:1 cannot be used: Connection refused.\n"


@pytest.mark.case("H29")
def test_a_server_without_a_home_names_the_cache(make_server: MakeServer) -> None:
    server = make_server()
    del server.environment["TERAZI_CACHE_DIR"]
    server.environment["HOME"] = ""
    done = server.terazi("serve", "--port", "0", "--admin-port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("terazi: this user has no home directory for the cache ~/.cache/terazi; ")
    assert "set TERAZI_CACHE_DIR (engine.cache_dir)" in done.stderr and done.stderr.count("\n") == 1
