"""The engine's address: held by one process at a time."""

from pathlib import Path

import pytest

from engine.process.listener import Address, ListenError


def test_an_address_is_held_by_one_and_free_again_after(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    held = Address(path)
    with pytest.raises(ListenError, match="another engine listens"):
        Address(path)
    held.close()
    again = Address(path)
    again.close()


def test_unusable_addresses_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="use a shorter one"):
        Address(tmp_path / ("x" * 120))
    with pytest.raises(ListenError, match="cannot write beside"):
        Address(tmp_path / "missing" / "engine.sock")
