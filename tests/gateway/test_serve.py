"""`terazi serve` without a server: what it prints, and that whatever stops its start is one line with its code."""

import json
import logging
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway import logs, process_memory, serve
from gateway.command import EXIT_ERROR, EXIT_UNREACHABLE, CommandError
from gateway.link.process import EngineStartError
from gateway.listen.listeners import ListenError
from gateway.lock import DataDirLock, DataDirLocked, write_server_info
from gateway.settings.values import load
from tenants.errors import StoreInUse, StoreUnreachable
from tests.support.gateway.fake_engine import hello

ABOUT = ("http://127.0.0.1:8080", "http://127.0.0.1:8081", "/data")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what `run` changes in its whole process."""
    monkeypatch.setattr(process_memory, "limit_arenas", lambda: None)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)


def ends_with(monkeypatch: pytest.MonkeyPatch, data_dir: Path, error: Exception) -> BaseException:
    """What `run` raises when the server ends like this."""

    class Ending:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def run(self) -> None:
            write_server_info(data_dir, {"pid": 1})
            raise error

    monkeypatch.setattr(serve, "_Server", Ending)
    with pytest.raises(Exception) as caught:
        serve.run(load({"data_dir": data_dir}, {}))
    return caught.value


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("error", "words", "exit_code", "code"),
    [
        (EngineStartError("no such model"), "no such model", EXIT_ERROR, "start_failed"),
        (ListenError("port 1 is taken"), "port 1 is taken", EXIT_ERROR, "start_failed"),
        (StoreInUse("the gateway at x"), "the gateway at x", EXIT_UNREACHABLE, "store_in_use"),
        (PermissionError(13, "Permission denied", "/data/terazi.db"), "/data/terazi.db", EXIT_ERROR, "error"),
    ],
)
def test_when_the_start_fails_it_is_one_line_with_its_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str, exit_code: int, code: str
) -> None:
    ended = ends_with(monkeypatch, tmp_path / "data", error)
    assert isinstance(ended, CommandError)
    assert words in str(ended) and "\n" not in str(ended)
    assert (ended.exit_code, ended.code) == (exit_code, code)
    assert not (tmp_path / "data" / "server.json").exists(), "nobody is sent to a server that has ended"


@pytest.mark.usefixtures("quiet")
def test_a_store_that_cannot_be_reached_keeps_its_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = StoreUnreachable("away")
    assert ends_with(monkeypatch, tmp_path / "data", error) is error


@pytest.mark.usefixtures("quiet")
def test_when_the_directory_is_held_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "_Server", None)
    with DataDirLock(tmp_path / "data"), pytest.raises(DataDirLocked):
        serve.run(load({"data_dir": tmp_path / "data"}, {}))


def test_the_first_request_can_be_pasted() -> None:
    words = shlex.split(serve.curl_line("http://127.0.0.1:8080", "tz_key", "tiny").replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8080/v1/chat/completions"]
    assert words[2:6] == ["-H", "Authorization: Bearer tz_key", "-H", "Content-Type: application/json"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["temperature"], body["messages"][0]["role"]) == ("tiny", 0, "user")


def test_as_json_the_announcement_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    serve._Announcement(*ABOUT).show(hello(), True)
    shown = json.loads(capfd.readouterr().out)
    assert shown == {
        "url": ABOUT[0],
        "admin_url": ABOUT[1],
        "data_dir": ABOUT[2],
        "model": "org/tiny-random",
        "simulated": False,
    }


def test_a_simulated_engine_is_announced_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    serve._Announcement(*ABOUT, key="tz_key").show(hello(kind="sim"), False)
    shown = capfd.readouterr().out
    assert "SIMULATED" in shown and f"serves org/tiny-random at {ABOUT[0]}" in shown and "Bearer tz_key" in shown
    serve._Announcement(*ABOUT).show(hello(), False)
    shown = capfd.readouterr().out
    assert "SIMULATED" not in shown and "curl" not in shown


def test_a_signal_that_changes_nothing_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "terazi.serve"):
        serve._note_signal(signal.SIGHUP)
    assert [record.getMessage() for record in caplog.records] == [
        "SIGHUP: the server goes on; there is nothing to reload, and SIGTERM ends it"
    ]
