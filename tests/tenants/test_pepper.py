"""Who may read the pepper: it is made private, or the start stops."""

import base64
import os
import stat
import tempfile
from pathlib import Path

import pytest

from tenants.errors import Invalid
from tenants.pepper import PEPPER_ENV, Pepper, load_pepper
from tests.support.other_user import NOBODY, as_nobody

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.case("U12")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o666])
def test_a_pepper_others_can_read_is_mended_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    pepper = load_pepper(tmp_path, {})
    path = tmp_path / "pepper"
    path.chmod(mode)
    assert load_pepper(tmp_path, {}) == pepper
    assert mode_of(path) == 0o600
    assert load_pepper(tmp_path, {}) == pepper
    assert len(caplog.messages) == 1 and f"mode {mode:04o}" in caplog.messages[0]


@pytest.mark.case("U12")
def test_a_pepper_that_cannot_be_mended_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_pepper(tmp_path, {})
    (tmp_path / "pepper").chmod(0o644)

    def refuse(self: Path, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(Invalid, match=r"mode 0644.*Read-only file system. Set its mode to 0600"):
        load_pepper(tmp_path, {})


@is_root
@pytest.mark.case("U12")
@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        (12_345, 0o600, "belongs to user 12345"),
        (12_345, 0o644, "belongs to user 12345"),
        (0, 0o644, "Others can read or change the pepper"),
        (0, 0o660, "Others can read or change the pepper"),
        (0, 0o440, ""),  # a mounted secret, for the group of the container
        (NOBODY, 0o400, ""),
    ],
)
def test_a_pepper_of_another_user_is_refused(owner: int, mode: int, said: str) -> None:
    with tempfile.TemporaryDirectory(prefix="terazi-pepper-") as name:
        directory = Path(name)
        pepper = load_pepper(directory, {})
        os.chown(directory / "pepper", owner, NOBODY)
        (directory / "pepper").chmod(mode)
        os.chown(directory, NOBODY, NOBODY)
        with as_nobody():
            if said:
                with pytest.raises(Invalid, match=said):
                    load_pepper(directory, {})
            else:
                assert load_pepper(directory, {}) == pepper
        assert mode_of(directory / "pepper") == mode


@is_root
@pytest.mark.case("U12")
def test_root_may_use_and_mend_a_service_users_pepper(tmp_path: Path) -> None:
    pepper = load_pepper(tmp_path, {})
    for path in (tmp_path, tmp_path / "pepper"):
        os.chown(path, NOBODY, NOBODY)
    (tmp_path / "pepper").chmod(0o644)
    assert load_pepper(tmp_path, {}) == pepper
    assert mode_of(tmp_path / "pepper") == 0o600
    os.chown(tmp_path / "pepper", 12_345, NOBODY)
    with pytest.raises(Invalid, match="belongs to user 12345"):
        load_pepper(tmp_path, {})


def test_a_pepper_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pepper")
    with pytest.raises(Invalid, match="not a regular file"):
        load_pepper(tmp_path, {})


def test_the_pepper_is_made_once_with_mode_0600(tmp_path: Path) -> None:
    first = load_pepper(tmp_path, {})
    assert stat.S_IMODE((tmp_path / "pepper").stat().st_mode) == 0o600
    assert load_pepper(tmp_path, {}) == first
    assert os.listdir(tmp_path) == ["pepper"]  # no draft is left
    assert base64.b64encode(first.secret).decode() not in repr(first)


def test_a_pepper_of_the_environment_wins_and_makes_no_file(tmp_path: Path) -> None:
    text = base64.b64encode(b"e" * 32).decode()
    assert load_pepper(tmp_path, {PEPPER_ENV: text}) == Pepper.of(b"e" * 32)
    assert not (tmp_path / "pepper").exists()


@pytest.mark.parametrize("text", ["", "short", base64.b64encode(b"x" * 31).decode(), "é" * 50])
def test_a_damaged_pepper_stops_the_start_and_is_not_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "pepper").write_text(text)
    with pytest.raises(Invalid, match="damaged"):
        load_pepper(tmp_path, {})
    assert (tmp_path / "pepper").read_text() == text
