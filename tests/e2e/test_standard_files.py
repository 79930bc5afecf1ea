"""Commands whose reader has left (`| head -1`), whose output is full, or that were started with closed files."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.e2e.clients import client_of, ledger_rows
from tests.support.e2e.server import Server, wait_until

MakeServer = Callable[..., Server]
CLOSED = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")


@pytest.fixture
def unread() -> Iterator[int]:
    """The writing end of a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def terazi(*arguments: str, stdout: int, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """A command with buffered output, as a shell starts it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [*prefix, sys.executable, "-P", "-m", "gateway.cli", *arguments]
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)


def works(server: Server) -> None:
    """It serves a request, ends well and has booked it."""
    key = server.make_key()
    client_of(server, key).completions.create(model="tiny-random", prompt="x", max_tokens=1)
    assert server.stop() == 0
    assert [row["outcome"] for row in ledger_rows(server)] == ["ok"]


@pytest.mark.case("H28")
def test_when_nobody_reads_its_output_a_server_serves_on(make_server: MakeServer, unread: int) -> None:
    server = make_server().start("--quickstart", stdout=unread)
    wait_until(lambda: "standard output is lost" in server.log, "a line about standard output")
    works(server)
    assert server.log.count("standard output is lost") == 1
    assert "Traceback" not in server.log and "Exception ignored" not in server.log


@pytest.mark.case("H28")
def test_when_nobody_reads_its_log_a_server_serves_on(make_server: MakeServer, unread: int) -> None:
    works(make_server().start(stderr=unread, stdout=unread))


@pytest.mark.case("H28")
def test_when_its_files_are_closed_no_other_takes_their_place(make_server: MakeServer) -> None:
    server = make_server().start(prefix=CLOSED)
    files = [os.readlink(f"/proc/{server.info['pid']}/fd/{number}") for number in range(3)]
    assert files == [os.devnull] * 3
    works(server)


@pytest.mark.case("H28")
@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["config", "show"], ["config", "show", "--json"]])
def test_when_its_reader_has_left_a_command_ends_quietly(arguments: list[str], unread: int) -> None:
    done = terazi(*arguments, stdout=unread)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.case("H28")
def test_a_report_nobody_reads_ends_quietly(running: Server, unread: int) -> None:
    for what in ("usage", "fairness"):
        done = terazi(what, "report", "--data-dir", str(running.data_dir), stdout=unread)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.case("H28")
def test_a_demo_nobody_reads_ends_quietly(tmp_path: Path, unread: int) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": 0, "team": "chat", "prompt_tokens": 3, "output_tokens": 2}\n')
    options = ["--engine", "sim", "--model", "tiny-random", "--out", str(tmp_path / "out"), "--trace", str(trace)]
    done = terazi("demo", *options, stdout=unread)
    assert done.returncode == 0
    assert "Error" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_when_the_disk_is_full_a_command_says_so() -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in (["version"], ["config", "show", "--json"]):
            done = terazi(*arguments, stdout=full.fileno())
            assert done.returncode == 1
            assert done.stderr == "terazi: the disk is full: standard output\n"


def test_without_standard_files_a_command_keeps_its_exit_code(tmp_path: Path) -> None:
    for code, arguments in ((0, ["version"]), (3, ["usage", "report", "--data-dir", str(tmp_path / "none")])):
        assert terazi(*arguments, stdout=subprocess.DEVNULL, prefix=CLOSED).returncode == code
