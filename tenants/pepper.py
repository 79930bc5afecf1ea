"""The pepper: 32 random bytes that key the hashes of all API keys. It is kept outside the database."""

import base64
import binascii
import hashlib
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tenants.errors import Invalid

PEPPER_ENV = "TERAZI_PEPPER"
PEPPER_FILE = "pepper"
_PEPPER_BYTES = 32
_OTHERS = 0o077  # anything for group and others
_WRITABLE = 0o027  # write for the group, anything for others
_log = logging.getLogger("terazi.pepper")


@dataclass(frozen=True, slots=True)
class Pepper:
    """The secret bytes and a short id. The id is stored with each key, so that a lost or swapped pepper is noticed."""

    pepper_id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Pepper(pepper_id={self.pepper_id!r})"

    @staticmethod
    def of(secret: bytes) -> "Pepper":
        """The pepper of these raw bytes. Raises Invalid when there are fewer than 32."""
        if len(secret) < _PEPPER_BYTES:
            raise Invalid(f"The pepper must have at least {_PEPPER_BYTES} bytes.")
        return Pepper(pepper_id=hashlib.sha256(b"terazi pepper id:" + secret).hexdigest()[:12], secret=secret)


def load_pepper(data_dir: Path, environ: Mapping[str, str] = os.environ) -> Pepper:
    """The pepper from TERAZI_PEPPER (base64), else from DATA_DIR/pepper. Makes that file, with mode 0600, the first
    time.

    Two processes may race. Each makes a complete file and links it to the name; the loser reads the winner's file. A
    file that others can read is made private, with a warning in the log.

    Raises Invalid in these cases:

    - The pepper is damaged. A new pepper would lock out every key, so none is made.
    - Others can read the file, and this user cannot change that.
    - The file belongs neither to this user, nor to root, nor to the directory's owner.
    - The path is not a regular file.
    """
    text = environ.get(PEPPER_ENV)
    if text:
        return _decode(text, f"the environment variable {PEPPER_ENV}")
    path = data_dir / PEPPER_FILE
    if not path.exists():
        _create(path)
    about, user = path.stat(), os.geteuid()
    if not stat.S_ISREG(about.st_mode):
        raise Invalid(f"The pepper {path} is not a regular file: put the pepper's file, or its backup, in its place.")
    if about.st_uid not in (user, 0, path.parent.stat().st_uid):
        raise Invalid(
            f"The pepper {path} belongs to user {about.st_uid}, who may read and replace it. If it is the right one, "
            f"make it this user's: chown {user} {path}"
        )
    pepper = _decode(path.read_text(encoding="ascii", errors="replace"), str(path))
    _make_private(path, about, user)
    return pepper


def _make_private(path: Path, about: os.stat_result, user: int) -> None:
    # When the file is not this user's, its owner may mean the group to read it, as with a mounted secret.
    too_open = _OTHERS if user in (0, about.st_uid) else _WRITABLE
    if not about.st_mode & too_open:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        raise Invalid(
            f"Others can read or change the pepper {path} (mode {stat.S_IMODE(about.st_mode):04o}), and this user "
            f"cannot make it private: {error.strerror}. Set its mode to 0600."
        ) from None
    _log.warning(
        "others could read the pepper %s (mode %04o); its mode is 0600 now",
        path,
        stat.S_IMODE(about.st_mode),
    )


def _create(path: Path) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(base64.b64encode(os.urandom(_PEPPER_BYTES)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # fails when another process was first: then its file is the pepper
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _decode(text: str, where: str) -> Pepper:
    try:
        secret = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) < _PEPPER_BYTES:
        raise Invalid(
            f"The pepper in {where} is damaged: it must be base64 of at least {_PEPPER_BYTES} bytes. Restore it from a "
            "backup: with another pepper no API key works."
        )
    return Pepper.of(secret)
