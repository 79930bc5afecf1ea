"""What `/readyz`, the metrics and the admin status say when the store cannot take a request."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway import lock
from gateway.cli.main import app
from gateway.lock import DataDirLock, DataDirUnusable
from gateway.openai.state import not_ready_reasons
from tests.support.gateway.harness import gateway
from tests.support.gateway.metrics import Shown

pytestmark = pytest.mark.anyio


@pytest.mark.case("T05")
async def test_when_the_journal_is_unwritable_it_is_not_ready() -> None:
    async with gateway() as g:
        shown = Shown(g)
        assert (await g.http.get("/readyz")).status_code == 200
        assert (shown.value("terazi_ready"), shown.value("terazi_journal_unwritable")) == (1, 0)
        g.ledger.is_unwritable = True
        answer = await g.http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == not_ready_reasons(g.state) == ["journal_unwritable"]
        assert (shown.value("terazi_ready"), shown.value("terazi_journal_unwritable")) == (0, 1)
        refused = await g.chat()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "store_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        g.ledger.is_unwritable = False
        assert (await g.http.get("/readyz")).json()["reasons"] == []


@pytest.mark.case("T08")
async def test_when_the_stores_lock_is_lost_it_is_not_ready() -> None:
    async with gateway() as g:
        grace = g.state.settings.store_lock_grace
        answers = []
        for lost in (0.0, 0.1, grace, grace + 0.1):
            g.state.store_lost_seconds = lambda lost=lost: lost  # type: ignore[misc]
            answer = await g.http.get("/readyz")
            answers.append((answer.status_code, answer.json()["degraded"], answer.json()["reasons"]))
        assert answers == [(200, False, []), *[(200, True, [])] * 2, (503, True, ["store_lock_lost"])]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte more can be written to a file of the data directory."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock.os, "pwrite", refuse)


@pytest.mark.case("T05")
@pytest.mark.parametrize("command", ["team create search", "db upgrade", "serve"])
def test_when_the_disk_is_full_a_command_says_where(tmp_path: Path, full: None, command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--data-dir", str(tmp_path / "data")])
    assert done.exit_code == 1
    assert done.stderr.strip() == f"terazi: the disk is full: {tmp_path / 'data'}"


@pytest.mark.case("T05")
def test_when_a_private_file_finds_no_room_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DataDirLock(tmp_path):

        def refuse(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "replace", refuse)
        for write in (lambda: lock.admin_token(tmp_path), lambda: lock.write_server_info(tmp_path, {})):
            with pytest.raises(DataDirUnusable, match=f"the disk is full: {tmp_path}"):
                write()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
