"""Fixtures of the models' tests."""

from pathlib import Path

import pytest

from engine.models.tiny import write_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    write_tiny_model(path)
    return path
