"""Fixtures of the native kernels' tests."""

import pytest

from engine.device.native import build, library
from tests.support.engine.torch_schedules import native_kernels


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.SWITCH, raising=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without optimisation: seconds less, the same code."""
    native_kernels()
    monkeypatch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS))
