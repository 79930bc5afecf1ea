"""Options that every command has."""

import os
from pathlib import Path
from typing import Annotated

import typer


def _directory(text: str) -> Path:
    """The directory.

    Raises BadParameter for an empty text: `--data-dir "$UNSET"` must not mean the working directory.
    """
    if not text.strip():
        raise typer.BadParameter("it is empty; give a directory")
    return Path(text)


DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="DIR", parser=_directory, help="The server's data directory (or TERAZI_DATA_DIR)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def data_dir_of(option: Path | None) -> Path:
    """The data directory: the option, else TERAZI_DATA_DIR, else the default. Raises SettingsError."""
    from gateway.settings.values import load

    return load({"data_dir": option}, os.environ).data_dir
