"""Fixtures of the engine's tests: a tiny model on disk, and the two ways to compute with it."""

from pathlib import Path

import pytest

from engine.models.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once; nothing here writes to it."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    """Whether the native kernels compute."""
    return bool(request.param)
