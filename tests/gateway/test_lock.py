"""One holder of a data directory, and files that only their owner can read."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import lock


def test_a_second_holder_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    with lock.DataDirLock(tmp_path):
        assert lock.is_held(tmp_path / "lock")
        with pytest.raises(lock.DataDirLocked) as refused:
            lock.DataDirLock(tmp_path).acquire()
        assert refused.value.pid == os.getpid()
        assert str(tmp_path) in str(refused.value)
    assert not lock.is_held(tmp_path / "lock")
    with lock.DataDirLock(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from gateway.lock import DataDirLock;"
        "DataDirLock(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    assert lock.lock_holder(tmp_path) is not None  # its file is still there
    with lock.DataDirLock(tmp_path):
        assert lock.lock_holder(tmp_path) == os.getpid()


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(lock.DataDirUnusable, match=r"cannot write to the data directory .*: Not a directory"):
        lock.DataDirLock(tmp_path / "file" / "data").acquire()


@pytest.mark.case("S17")
def test_the_admin_token_is_made_once_and_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        token = lock.admin_token(tmp_path)
    finally:
        os.umask(before)
    assert len(token) > 40
    assert stat.S_IMODE((tmp_path / "admin.token").stat().st_mode) == 0o600
    assert lock.admin_token(tmp_path) == token == lock.read_admin_token(tmp_path)


@pytest.mark.case("S17", "U12")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606])
def test_an_admin_token_that_others_may_read_is_mended(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    token = lock.admin_token(tmp_path)
    (tmp_path / "admin.token").chmod(mode)
    assert lock.admin_token(tmp_path) == token
    assert stat.S_IMODE((tmp_path / "admin.token").stat().st_mode) == 0o600
    assert lock.admin_token(tmp_path) == token
    assert [f"mode {mode:04o}" in line for line in caplog.messages] == [True]  # said once


def test_server_info_counts_only_while_its_writer_holds_the_lock(tmp_path: Path) -> None:
    assert lock.read_server_info(tmp_path) is None
    with lock.DataDirLock(tmp_path):
        lock.write_server_info(tmp_path, {"pid": os.getpid(), "url": "http://localhost:1"})
        assert lock.read_server_info(tmp_path) == {"pid": os.getpid(), "url": "http://localhost:1"}
        lock.write_server_info(tmp_path, {"pid": -1, "url": "left by someone else"})
        assert lock.read_server_info(tmp_path) is None
        lock.remove_server_info(tmp_path)
        lock.remove_server_info(tmp_path)
    (tmp_path / "server.json").write_text("{half a doc")
    assert lock.read_server_info(tmp_path) is None
