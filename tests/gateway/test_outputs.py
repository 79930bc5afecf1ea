"""`--out`: whatever the name stands for, the reader gets the whole report and nothing else is lost."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.command import CommandError
from gateway.demo.run import write_report
from gateway.outputs import write_output
from tests.support.other_user import NOBODY, as_nobody

REPORT = ["usage", "report", "--from", "2026-05-10", "--to", "2026-05-11", "--format", "csv"]


def run(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(data_dir)])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outputs") / "data"
    assert run(path, "team", "create", "search").exit_code == 0
    return path


@pytest.fixture(scope="module")
def report(data_dir: Path) -> bytes:
    """What the terminal gets."""
    done = run(data_dir, *REPORT)
    assert done.exit_code == 0 and len(done.stdout_bytes) > 100
    return done.stdout_bytes


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user can enter: pytest's own are closed to all but its user."""
    with tempfile.TemporaryDirectory(prefix="terazi-out-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.case("T04")
def test_a_new_report_file_is_for_its_owner_alone(data_dir: Path, tmp_path: Path, report: bytes) -> None:
    before = os.umask(0)
    try:
        done = run(data_dir, *REPORT, "--out", str(tmp_path / "r.csv"))
    finally:
        os.umask(before)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"written: {tmp_path / 'r.csv'}\n")
    assert (tmp_path / "r.csv").read_bytes() == report
    assert mode_of(tmp_path / "r.csv") == 0o600
    assert os.listdir(tmp_path) == ["r.csv"]


@pytest.mark.case("H25")
def test_an_existing_file_keeps_mode_owner_and_group(data_dir: Path, tmp_path: Path, report: bytes) -> None:
    out = tmp_path / "r.csv"
    out.write_text("old")
    is_root = os.geteuid() == 0
    owner, group = (12_345, 23_456) if is_root else (os.geteuid(), os.getgroups()[-1])
    os.chown(out, owner, group)
    out.chmod(0o640)
    assert run(data_dir, *REPORT, "--out", str(out)).exit_code == 0
    about = out.stat()
    assert out.read_bytes() == report
    assert (stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid) == (0o640, owner, group)
    assert os.listdir(tmp_path) == ["r.csv"]


@pytest.mark.case("H25")
@pytest.mark.parametrize("has_target", [True, False])
def test_a_link_stays_and_its_target_is_written(
    data_dir: Path, tmp_path: Path, report: bytes, has_target: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "target.csv"
    if has_target:
        target.write_text("old")
    (tmp_path / "second").symlink_to("elsewhere/target.csv")
    (tmp_path / "first").symlink_to("second")
    assert run(data_dir, *REPORT, "--out", str(tmp_path / "first")).exit_code == 0
    assert (tmp_path / "first").readlink() == Path("second")
    assert (tmp_path / "second").readlink() == Path("elsewhere/target.csv")
    assert target.read_bytes() == report
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "first", "second"]
    assert os.listdir(tmp_path / "elsewhere") == ["target.csv"]


@pytest.mark.case("H25", "T04")
def test_a_pipe_is_written_and_stays_a_pipe(data_dir: Path, tmp_path: Path, report: bytes) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        got: list[bytes] = []
        reader = threading.Thread(target=lambda got=got: got.append(pipe.read_bytes()), daemon=True)
        reader.start()
        done = run(data_dir, *REPORT, "--out", str(tmp_path / name))
        reader.join(30)
        assert (done.exit_code, got) == (0, [report])
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@pytest.mark.case("T04")
def test_a_terminal_is_written_and_stays_a_device(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        write_output(os.ttyname(theirs), "whole\n")
        assert os.read(ours, 100) == b"whole\r\n"
        assert stat.S_ISCHR(os.stat(os.ttyname(theirs)).st_mode)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.case("T04")
def test_a_device_node_is_never_replaced(data_dir: Path, tmp_path: Path) -> None:
    node = tmp_path / "full"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # /dev/full
        os.close(os.open(node, os.O_WRONLY))
    except PermissionError:
        pytest.skip("this user may make no device, or it may not be used here")
    done = run(data_dir, *REPORT, "--out", str(node))
    assert (done.exit_code, done.stderr) == (1, f"terazi: the disk is full: {node}\n")
    assert stat.S_ISCHR(node.lstat().st_mode) and os.listdir(tmp_path) == ["full"]


@pytest.mark.case("T04")
@pytest.mark.parametrize(
    "arguments",
    [
        ["usage", "report", "--format", "table"],
        ["usage", "report", "--format", "json"],
        ["usage", "report", "--format", "csv"],
        ["fairness", "report", "--format", "table"],
        ["fairness", "report", "--format", "json"],
        ["fairness", "report", "--format", "html"],
    ],
)
def test_a_dash_is_standard_output(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*arguments, "--from", "2026-05-10", "--to", "2026-05-11"]
    plain, dash = run(data_dir, *arguments), run(data_dir, *arguments, "--out", "-")
    assert (dash.exit_code, dash.stderr) == (0, "")
    assert dash.stdout_bytes == plain.stdout_bytes != b""
    assert os.listdir(tmp_path) == []
    assert run(data_dir, *arguments, "--out", "./-").exit_code == 0
    assert os.listdir(tmp_path) == ["-"]  # a name that only looks like it


@pytest.mark.case("H25")
def test_an_open_file_is_appended_to_where_it_stands(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    inode = log.stat().st_ino
    with log.open("ab") as opened:
        write_output(f"/dev/fd/{opened.fileno()}", "report\n")
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{opened.fileno()}")
        write_output(tmp_path / "link", "again\n")
    assert log.read_text() == "before\nreport\nagain\n"
    assert log.stat().st_ino == inode


@pytest.mark.case("T04", "H25")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("there", "Is a directory"),
        ("new/", "Is a directory"),
        ("missing/r.csv", "No such file or directory"),
        ("file/r.csv", "Not a directory"),
        ("n" * 256, "File name too long"),
        ("loop", "Too many levels of symbolic links"),
        ("nul\0nul", "embedded null byte"),
    ],
)
def test_what_cannot_be_written_is_one_line(data_dir: Path, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    out = f"{tmp_path}/{name}"
    done = run(data_dir, *REPORT, "--out", out)
    assert (done.exit_code, done.stderr) == (1, f"terazi: {out} cannot be written: {why}\n")
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "file").read_text() == "kept"


def test_the_longest_name_there_is_works(data_dir: Path, tmp_path: Path, report: bytes) -> None:
    out = tmp_path / ("n" * 255)
    assert run(data_dir, *REPORT, "--out", str(out)).exit_code == 0
    assert out.read_bytes() == report


@pytest.mark.case("T04", "H25")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file_whole(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    out = tmp_path / "r.csv"
    out.write_text("old and whole")

    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        done = run(data_dir, *REPORT, "--out", str(out))
        new = run(data_dir, *REPORT, "--out", str(tmp_path / "new.csv"))
    assert (done.exit_code, done.stderr) == (1, f"terazi: the disk is full: {out}\n")
    assert (new.exit_code, new.stderr) == (1, f"terazi: the disk is full: {tmp_path / 'new.csv'}\n")
    assert out.read_text() == "old and whole" and os.listdir(tmp_path) == ["r.csv"]


@pytest.mark.case("H25")
def test_files_this_user_may_not_write_are_left_alone(shared: Path) -> None:
    (shared / "closed").mkdir()
    (shared / "theirs").write_text("kept")
    (shared / "theirs").chmod(0o444)
    (shared / "closed").chmod(0o555)
    shared.chmod(0o777)  # a rename over the file would be allowed
    try:
        with as_nobody():
            for name in ("closed/r.csv", "theirs"):
                with pytest.raises(CommandError, match=r"cannot be written: Permission denied$"):
                    write_output(shared / name, "report")
    finally:
        (shared / "closed").chmod(0o755)
    assert (shared / "theirs").read_text() == "kept"
    assert sorted(os.listdir(shared)) == ["closed", "theirs"] and os.listdir(shared / "closed") == []


@pytest.mark.case("H25")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_group_that_cannot_be_kept_is_not_lost(shared: Path) -> None:
    out = shared / "r.csv"
    out.write_text("kept")
    os.chown(out, NOBODY, 23_456)
    out.chmod(0o640)
    os.chown(shared, NOBODY, NOBODY)
    with as_nobody(), pytest.raises(CommandError, match="user or group that this user cannot give it again"):
        write_output(out, "report")
    assert out.read_text() == "kept" and os.listdir(shared) == ["r.csv"]


@pytest.mark.case("T04")
def test_the_pages_of_the_demo_keep_links_and_privacy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.reports.comparison.render_demo", lambda report: "<!doctype html>")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").symlink_to("../page.html")
    assert write_report({"runs": []}, tmp_path / "out") == tmp_path / "out" / "report.html"
    assert (tmp_path / "out" / "report.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == "<!doctype html>"
    assert mode_of(tmp_path / "out" / "report.json") == mode_of(tmp_path / "page.html") == 0o600
    with pytest.raises(CommandError, match="cannot be written: File exists"):
        write_report({"runs": []}, tmp_path / "page.html")


def test_a_demo_says_at_once_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["demo", "--engine", "sim", "--out", str(tmp_path / "file")])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"terazi: {tmp_path / 'file'} cannot be written: File exists\n"


@pytest.mark.case("H25")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_is_no_error(data_dir: Path, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-P", "-m", "gateway.cli", *REPORT, "--data-dir", str(data_dir), "--out", "-"]
    with contextlib.closing(os.fdopen(writing, "wb")) as closed:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.case("T04")
@pytest.mark.parametrize("arguments", [["team", "list"], ["team", "list", "--json"], ["version"]])
def test_a_full_disk_behind_standard_output_is_one_line(data_dir: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "gateway.cli", *arguments, "--data-dir", str(data_dir)]
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (1, b"terazi: the disk is full: standard output\n")


def test_an_empty_name_is_refused(data_dir: Path) -> None:
    done = run(data_dir, *REPORT, "--out", "")
    assert done.exit_code == 2 and "it is empty" in done.stderr
