"""Options that every command has."""

import os
from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="The server's data directory (or TERAZI_DATA_DIR)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def data_dir_of(option: Path | None) -> Path:
    """The data directory: flag, TERAZI_DATA_DIR or the default. Raises SettingsError."""
    from gateway.settings import load

    return load({"data_dir": option}, os.environ).data_dir
