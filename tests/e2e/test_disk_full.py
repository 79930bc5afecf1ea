"""A server whose data directory is on a disk that is really full: a small tmpfs. Needs root, to mount it."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.server import Server, is_running, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as file:
        while True:
            try:
                os.write(file.fileno(), b"x" * 512)
            except OSError:
                return


def ask(server: Server, key: str) -> httpx.Response:
    body = {"model": "tiny-random", "prompt": "hello", "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)


@pytest.mark.case("T05")
def test_when_the_disk_fills_the_server_says_so_and_recovers(
    make_server: Callable[..., Server], small_disk: Path
) -> None:
    server = make_server()
    server.environment["TERAZI_DATA_DIR"] = str(small_disk / "data")
    server.data_dir = small_disk / "data"
    try:
        server.start()
        key = server.make_key()
        assert ask(server, key).status_code == 200
        fill(small_disk)
        refused = [ask(server, key).status_code for _ in range(10)]
        assert 503 in refused[:2] and set(refused[1:]) == {503}, refused
        answer = httpx.get(f"{server.url}/readyz")
        assert (answer.status_code, answer.json()["reasons"]) == (503, ["journal_unwritable"])
        assert not server.status()["ready"]
        assert server.log.count("the disk is full") == 1, server.log
        command = server.terazi("team", "create", "other")
        if command.returncode:  # a page of the database's log may have had room
            assert "the disk is full" in command.stderr and "Traceback" not in command.stderr, command.stderr
        (small_disk / "filler").unlink()
        wait_until(lambda: server.readyz() == 200, "ready again, without a request")
        assert ask(server, key).status_code == 200
        engine_pid = server.status()["engine"]["pid"]
        server.kill()
        wait_until(lambda: not is_running(engine_pid), "the engine has ended")
        fill(small_disk)
        # A directory of its own: the start of the old one may free what its journal took, and then there is room.
        options = ["--engine", "sim", "--model", "tiny-random", "--port", "0", "--admin-port", "0"]
        again = server.terazi("serve", *options, "--data-dir", str(small_disk / "again"))
        assert again.returncode and "Traceback" not in again.stderr
        assert f"the disk is full: {small_disk / 'again'}" in again.stderr, again.stderr
        fresh = server.terazi("team", "create", "third", "--data-dir", str(small_disk / "fresh"))
        assert fresh.returncode and "Traceback" not in fresh.stderr
        assert f"the disk is full: {small_disk / 'fresh'}" in fresh.stderr, fresh.stderr
    finally:
        server.kill()
