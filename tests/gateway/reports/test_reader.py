"""Reports of a directory: what cannot be read is one line with its exit code, and nothing is made."""

import os
from pathlib import Path

import pytest

from gateway.command import EXIT_NOT_FOUND, EXIT_USAGE, CommandError
from gateway.reports.reader import open_reports
from tenants.database import sqlite_url
from tenants.migrate import upgrade

pytestmark = pytest.mark.anyio


async def refusal(data_dir: Path, *period: str) -> CommandError:
    with pytest.raises(CommandError) as caught:
        async with open_reports(data_dir, *period, environment={}) as reports:
            await reports.usage(team="nobody")
    return caught.value


async def test_a_directory_without_a_database_gets_none(tmp_path: Path) -> None:
    error = await refusal(tmp_path)
    assert (error.exit_code, error.code) == (EXIT_NOT_FOUND, "not_found")
    assert f"there is no database in {tmp_path}" in str(error)
    assert os.listdir(tmp_path) == []


async def test_a_wrong_period_and_an_unknown_team_are_told_apart(tmp_path: Path) -> None:
    await upgrade(sqlite_url(tmp_path / "terazi.db"))
    assert (await refusal(tmp_path, "yesterday-ish")).exit_code == EXIT_USAGE
    assert (await refusal(tmp_path)).exit_code == EXIT_NOT_FOUND


async def test_a_database_without_tables_is_sent_to_the_upgrade(tmp_path: Path) -> None:
    (tmp_path / "terazi.db").touch()
    assert "try terazi db upgrade" in str(await refusal(tmp_path))
