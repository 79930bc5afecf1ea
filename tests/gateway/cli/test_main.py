"""Commands without a server: exit codes, one JSON document, and what is refused."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import reference
from gateway.cli.main import app, main
from gateway.lock import DataDirLock


def run(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(data_dir)])


def ok(data_dir: Path, *arguments: str) -> Any:
    done = run(data_dir, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with team `taken`, made once and only copied."""
    path = tmp_path_factory.mktemp("seed") / "data"
    ok(path, "team", "create", "taken", "--tier", "silver")
    ok(path, "quota", "set", "taken", "--tokens-per-minute", "5")
    return path


@pytest.fixture
def data_dir(seed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(seed, tmp_path / "data")


def test_a_team_and_its_key_from_nothing(tmp_path: Path) -> None:
    team = ok(tmp_path, "team", "create", "search", "--tier", "gold")
    assert (team["name"], team["tier"], team["limits"]["concurrent"]) == ("search", "gold", None)
    key = ok(tmp_path, "key", "create", "search")
    assert set(key) == {"id", "key", "team"}
    assert key["key"].startswith(f"trz-{key['id']}-")
    listed = ok(tmp_path, "key", "list", "--team", "search")["data"]
    assert [(one["id"], one["status"]) for one in listed] == [(key["id"], "active")]
    assert key["key"] not in json.dumps(listed)
    assert ok(tmp_path, "key", "revoke", key["id"])["status"] == "revoked"
    assert [one["name"] for one in ok(tmp_path, "team", "list")["data"]] == ["search"]
    assert ok(tmp_path, "team", "set", "search", "--tier", "bronze", "--name", "search-2")["tier"] == "bronze"
    assert ok(tmp_path, "team", "show", "search-2")["name"] == "search-2"


def test_tables_show_the_same_facts(tmp_path: Path) -> None:
    ok(tmp_path, "team", "create", "search", "--tier", "gold")
    table = run(tmp_path, "team", "list").stdout
    assert "search" in table
    assert "unlimited" in table
    record = run(tmp_path, "tier", "show", "gold").stdout
    assert ["weight", "4"] in [line.split() for line in record.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["team", "show", "nobody"], 3),
        (["key", "create", "nobody"], 3),
        (["key", "revoke", "nobody"], 3),
        (["quota", "show", "nobody"], 3),
        (["tier", "show", "platinum"], 3),
        (["team", "create", "taken", "--tier", "gold"], 4),
        (["team", "create", "x", "--tier", "platinum"], 3),
        (["team", "create", " ML ", "--tier", "gold"], 2),
        (["team", "create", "=cmd|' /C calc'!A0", "--tier", "gold"], 2),
        (["team", "create", "<script>", "--tier", "gold"], 2),
        (["team", "show", "../../etc"], 3),
        (["team", "show", "."], 3),
        (["team", "show", ".."], 3),
        (["team", "show", ""], 3),
        (["team", "show", "taken/quota"], 3),
        (["team", "set", ".", "--archive"], 3),
        (["usage", "report", "--team", "nobody"], 3),
        (["team", "create"], 2),
        (["team", "set", "taken"], 2),
        (["tier", "set", "gold"], 2),
        (["tier", "set", "gold", "--weight", "0"], 2),
        (["tier", "set", "gold", "--weight", "1001"], 2),
        (["tier", "set", "gold", "--weight", "1.5"], 2),
        (["tier", "set", "gold", "--start-level", "8"], 2),
        (["tier", "set", "gold", "--starving-after", "3"], 2),
        (["usage", "report", "--by", "colour"], 2),
        (["usage", "report", "--from", "yesterday"], 2),
        (["usage", "report", "--format", "xml"], 2),
        (["simulate", "--trace", "/nowhere.jsonl"], 2),
        (["nonsense"], 2),
    ],
)
def test_exit_codes(data_dir: Path, arguments: list[str], code: int) -> None:
    done = run(data_dir, *arguments)
    assert done.exit_code == code, done.stderr
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


def test_an_error_with_json_is_one_document_too(data_dir: Path) -> None:
    done = run(data_dir, "team", "show", "nobody", "--json")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["error"]["code"] == "team_not_found"
    assert done.stderr.startswith("terazi: ")


@pytest.mark.case("B16")
@pytest.mark.parametrize(
    "amount", ["-1", "NaN", "Infinity", "inf", "1e400", "1e3", "10,000", "", " ", "0x10", "1_000", "none"]
)
def test_impossible_amounts_are_refused_and_change_nothing(data_dir: Path, amount: str) -> None:
    done = run(data_dir, "quota", "set", "taken", f"--tokens-per-minute={amount}")
    assert done.exit_code == 2
    assert "tokens_per_minute" in done.stderr
    assert ok(data_dir, "quota", "show", "taken")["limits"]["tokens_per_minute"] == 5


@pytest.mark.case("B16")
def test_zero_is_none_and_unlimited_is_a_word(tmp_path: Path) -> None:
    ok(tmp_path, "team", "create", "search", "--tier", "gold")
    set_once = ok(tmp_path, "quota", "set", "search", "--concurrent", "0", "--requests-per-minute", "7")["limits"]
    assert (set_once["concurrent"], set_once["requests_per_minute"], set_once["tokens_per_minute"]) == (0, 7, None)
    set_twice = ok(tmp_path, "quota", "set", "search", "--concurrent", "unlimited")["limits"]
    assert (set_twice["concurrent"], set_twice["requests_per_minute"]) == (None, 7)


def test_a_locked_data_directory_without_a_server_is_code_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admin.client.LOCKED_SECONDS", 0.0)
    with DataDirLock(tmp_path):
        assert run(tmp_path, "team", "create", "a").exit_code == 6
        assert run(tmp_path, "db", "upgrade").exit_code == 6


def test_a_server_that_does_not_answer_is_code_6(tmp_path: Path) -> None:
    import os
    import socket

    from gateway import lock

    with DataDirLock(tmp_path), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        lock.admin_token(tmp_path)
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        lock.write_server_info(tmp_path, {"pid": os.getpid(), "url": url, "admin_url": url})
        done = run(tmp_path, "team", "list")
    assert done.exit_code == 6
    assert "does not answer" in done.stderr


def test_reports_of_a_directory_without_a_database_make_none(tmp_path: Path) -> None:
    for command in (["usage", "report"], ["fairness", "report"]):
        assert run(tmp_path, *command).exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_db_upgrade_makes_a_schema_that_reports_read_unlocked(tmp_path: Path) -> None:
    assert ok(tmp_path, "db", "upgrade")["upgraded"] is True
    with DataDirLock(tmp_path):
        report = ok(tmp_path, "usage", "report", "--by", "team,day")
        assert (report["data"], report["total"]["requests"]) == ([], 0)
        assert ok(tmp_path, "fairness", "report")["data"] == []
    assert run(tmp_path, "usage", "report").exit_code == 0
    assert run(tmp_path, "fairness", "report", "--format", "json").stdout.startswith("{")


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100])
def test_a_report_of_a_strange_database_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "terazi.db").write_bytes(content)
    for command in (["usage", "report"], ["fairness", "report"]):
        done = run(tmp_path, *command)
        assert done.exit_code == 1
        assert len(done.stderr.strip().splitlines()) == 1
        assert "the database cannot be read" in done.stderr


def test_simulate_is_the_same_twice_and_compares_policies(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"t": i * 0.01, "team": "ab"[i % 2], "prompt_tokens": 8, "output_tokens": 4 + i} for i in range(12)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["simulate", "--trace", str(trace), "--policy", "eg-mlfq", "--policy", "fcfs", "--tier", "a=gold"]
    first = run(tmp_path, *command, "--json")
    assert first.exit_code == 0, first.stderr
    assert first.stdout == run(tmp_path, *command, "--json").stdout
    report = json.loads(first.stdout)
    assert [policy["policy"] for policy in report["policies"]] == ["eg-mlfq", "fcfs"]
    assert [(team["team"], team["tier"]) for team in report["policies"][0]["teams"]] == [("a", "gold"), ("b", "silver")]
    assert run(tmp_path, *command).exit_code == 0
    assert run(tmp_path, *command, "--tier", "a").exit_code == 2


@pytest.mark.case("H09")
def test_when_a_team_is_called_all_then_the_total_stays_apart(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    teams = ["all", "a=b", "TOTAL"]
    rows = [{"t": i, "team": team, "prompt_tokens": 8.0, "output_tokens": 4} for i, team in enumerate(teams)]
    trace.write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows))
    command = ["simulate", "--trace", str(trace), "--policy", "fcfs", "--tier", "a=b=gold", "--tier", "all=bronze"]
    (policy,) = ok(tmp_path, *command)["policies"]
    tiers = {team["team"]: team["tier"] for team in policy["teams"]}
    assert tiers == {"a=b": "gold", "all": "bronze", "TOTAL": "silver"}
    assert policy["total"]["num_requests"] == 3
    lines = [line.split() for line in run(tmp_path, *command).stdout.splitlines() if line.strip().startswith("fcfs")]
    assert [cells[1] for cells in lines] == ["TOTAL", "a=b", "all", "TOTAL"]
    assert lines[-1][:5] == ["fcfs", "TOTAL", "of", "all", "3"]


@pytest.mark.case("H09")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"x", mtime=0), "line 1: the file is gzip, not text: unpack it first"),
        (b"t,team,prompt_tokens,output_tokens\n1,a,2,3\n", "line 1: .*CSV.*four names t, team, prompt_tokens"),
        (b'{"t": 1.7e9, "team": "a", "prompt_tokens": 2, "output_tokens": 3}\n', "line 1: .*subtract the first time"),
    ],
    ids=["gzip", "csv", "epoch"],
)
@pytest.mark.parametrize("command", [["simulate"], ["demo", "--engine", "sim", "--model", "tiny-random"]])
def test_when_a_trace_is_no_trace_then_one_line_and_2(
    tmp_path: Path, command: list[str], content: bytes, words: str
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(content)
    done = run(tmp_path / "data", *command, "--trace", str(trace))
    assert done.exit_code == 2
    assert re.search(rf"{re.escape(str(trace))}, {words}", done.stderr) and len(done.stderr.splitlines()) == 1


@pytest.mark.case("H09")
def test_when_a_demo_cannot_have_a_team_then_it_says_so_first(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"t": 0, "team": "a=b", "prompt_tokens": 2, "output_tokens": 3}\n')
    done = run(tmp_path / "data", "demo", "--engine", "sim", "--model", "tiny-random", "--trace", str(trace))
    assert done.exit_code == 2 and f"{trace}: a server has no team 'a=b'; rename it" in done.stderr


def test_simulate_takes_modes_and_says_what_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"t": 0, "team": "a", "prompt_tokens": 8, "output_tokens": tokens} for tokens in (4, 40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["simulate", "--trace", str(trace), "--policy", "fcfs"]
    report = ok(tmp_path, *command, "--memory-preemption", "recompute")
    assert (report["memory"]["preemption"], report["coast"]) == ("recompute", True)
    assert ok(tmp_path, *command, "--no-coast")["coast"] is False
    monkeypatch.setenv("TERAZI_COAST", "false")
    assert ok(tmp_path, *command)["coast"] is False and ok(tmp_path, *command, "--coast")["coast"] is True
    printed = run(tmp_path, *command, "--kv-memory", "400KiB").stdout
    assert "fcfs: 1 of 2 requests cut: prompt and output are more than the KV memory (16 tokens)" in printed
    nothing = run(tmp_path, *command, "--kv-memory", "1")
    assert nothing.exit_code == 2 and "holds no block" in nothing.stderr


def test_config_show_names_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAZI_POLICY", "fcfs")
    rows = {row["name"]: row for row in ok(tmp_path, "config", "show")["settings"]}
    assert rows["policy"] | {"path": "", "flag": ""} == {
        "name": "policy",
        "value": "fcfs",
        "source": "environment TERAZI_POLICY",
        "path": "",
        "env": "TERAZI_POLICY",
        "flag": "",
    }
    assert rows["data_dir"]["source"] == "flag --data-dir"
    assert rows["port"]["source"] == "default"


def test_the_table_of_settings_has_their_units(tmp_path: Path) -> None:
    lines = [line.split() for line in run(tmp_path, "config", "show").stdout.splitlines()]
    values = {cells[0]: cells[1] for cells in lines if len(cells) > 2}
    assert (values["kv_memory"], values["drain_timeout"], values["journal_fsync_interval"]) == ("2GiB", "60s", "50ms")
    assert values["deterministic"] == "false"
    assert ok(tmp_path, "config", "show")["settings"][0]["name"] == "data_dir"


def test_the_version_is_an_option_too(tmp_path: Path) -> None:
    asked = CliRunner().invoke(app, ["--version"])
    assert (asked.exit_code, asked.stdout) == (0, run(tmp_path, "version").stdout)


def test_archived_teams_are_listed_when_asked_for(data_dir: Path) -> None:
    assert ok(data_dir, "team", "set", "taken", "--archive")["archived_at"] is not None
    assert ok(data_dir, "team", "list")["data"] == []
    assert [team["name"] for team in ok(data_dir, "team", "list", "--archived")["data"]] == ["taken"]
    assert ok(data_dir, "team", "set", "taken", "--restore")["archived_at"] is None


def test_a_new_key_comes_with_a_word_of_warning_outside_the_record(data_dir: Path) -> None:
    made = run(data_dir, "key", "create", "taken")
    assert [line.split()[0] for line in made.stdout.splitlines()] == ["id", "key", "team"]
    assert "not be shown again" in made.stderr
    assert run(data_dir, "key", "create", "taken", "--json").stderr == ""


def test_model_show_gives_name_path_and_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAZI_CACHE_DIR", str(tmp_path / "cache"))
    record = ok(tmp_path, "model", "show", "--model", "tiny-random")
    assert record["name"] == "tiny-random"
    assert len(record["sha256"]) == 64
    assert (Path(record["path"]) / "tokenizer.json").exists()
    missing = run(tmp_path, "model", "show", "--model", str(tmp_path / "none"))
    assert missing.exit_code == 1


def test_every_command_takes_data_dir_and_json() -> None:
    for name, command in reference.walk_commands():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--data-dir", "--json"} <= options, name


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom gateway.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        "print('MODULES', *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    modules = set(done.stdout.partition("MODULES ")[2].split())
    heavy = {
        "torch",
        "numpy",
        "sqlalchemy",
        "alembic",
        "httpx",
        "starlette",
        "uvicorn",
        "tokenizers",
        "jinja2",
        "msgspec",
    }
    assert modules & heavy == set()
    assert len(modules) < 400, len(modules)


def _as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "damage", "code"),
    [
        ("pepper", lambda path: path.write_text("not base64"), 1),
        ("pepper", _as_directory, 1),
        ("admin.token", lambda path: path.write_text("short"), 1),
        ("admin.token", lambda path: path.write_bytes(b"\xff" * 40), 1),
        ("admin.token", lambda path: path.write_text("one two three four five"), 1),
        ("admin.token", _as_directory, 1),
        ("terazi.db", lambda path: path.write_text("this is not a database at all"), 6),
        ("terazi.db", _as_directory, 6),
    ],
)
def test_a_damaged_file_is_one_line_and_one_document(
    data_dir: Path, name: str, damage: Callable[[Path], object], code: int
) -> None:
    damage(data_dir / name)
    done = run(data_dir, "team", "create", "one", "--json")
    assert done.exit_code == code, done.stderr
    assert set(json.loads(done.stdout)) == {"error"}
    assert done.stderr.startswith("terazi: ") and done.stderr.count("\n") == 1
    assert str(data_dir / name) in done.stderr


def test_an_empty_admin_token_is_made_anew(data_dir: Path) -> None:
    (data_dir / "admin.token").write_text("")
    ok(data_dir, "team", "create", "one")
    assert len((data_dir / "admin.token").read_text()) > 40


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["terazi", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense", "--json"],
        ["team", "create", "--json"],
        ["usage", "report", "--format", "json", "--nonsense"],
        ["usage", "report", "--format=json", "--nonsense"],
        ["team", "list", "--json", "--data-dir", ""],
        ["team", "create", "caf\udce9", "--json"],
    ],
)
def test_a_usage_error_with_json_is_one_document_too(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["code"] == "usage"
    assert shown.err.strip()


def test_help_ends_with_zero_and_no_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, "team", "--help") == 0
    assert capsys.readouterr().out.startswith("Usage: ")


def test_a_command_waits_for_another_command_to_end(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = DataDirLock(data_dir)
    other.acquire()

    async def meanwhile_it_ends(_: float) -> None:
        other.release()

    monkeypatch.setattr("gateway.admin.client.asyncio.sleep", meanwhile_it_ends)
    assert ok(data_dir, "team", "create", "second")["name"] == "second"


@pytest.mark.case("G59")
def test_a_team_without_a_tier_gets_the_least_default(data_dir: Path) -> None:
    assert ok(data_dir, "team", "create", "plain")["tier"] == "silver"
    tiers = {tier["name"]: tier for tier in ok(data_dir, "tier", "list")["data"]}
    default, best = tiers["silver"], tiers["gold"]
    assert default["weight"] < best["weight"] and default["start_level"] > best["start_level"]
    assert run(data_dir, "team", "create", "none", "--tier", "").exit_code != 0
    assert set(ok(data_dir, "quota", "show", "plain")["limits"].values()) == {None}, "no limit that nobody set"


def test_tiers_are_listed_with_their_maximum_pause(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run(data_dir, "tier", "list").stdout
    assert "no maximum pause for gold, silver, bronze: no engine is connected" in listed
    known = ok(data_dir, "tier", "list")
    for tier, seconds in zip(known["data"], (1.5, 12.25, None), strict=True):
        full = seconds and seconds * 4096
        tier |= {"max_pause_empty_queue_seconds": seconds, "max_pause_seconds": full, "max_pause_queue": 4096}
        tier |= {"max_pause_unknown": None if seconds else "no team has this tier"}
    monkeypatch.setattr("gateway.cli.admin._call", lambda *_, **__: known)
    lines = run(data_dir, "tier", "list").stdout.splitlines()
    by_name = {line.split()[0]: line for line in lines if line.split()}
    cells = {name: re.split(r" {2,}", line.strip()) for name, line in by_name.items()}
    assert cells["name"][-2:] == ["max pause with an empty queue", "max pause with a full queue"]
    assert cells["gold"][-2:] == ["1.50 s", "102.4 min (4,096 requests)"]
    assert cells["silver"][-2:] == ["12.2 s", "13.9 h (4,096 requests)"]
    assert "no maximum pause for bronze: no team has this tier" in lines
    assert "quota set TEAM --concurrent N" in lines[-1]
    monkeypatch.setattr("gateway.cli.admin._call", lambda *_, **__: known["data"][0])
    shown = run(data_dir, "tier", "show", "gold").stdout
    assert "max_pause_with_an_empty_queue  1.50 s" in shown and "no_max_pause                   -" in shown


@pytest.mark.case("U05")
def test_a_change_says_whose_maximum_pause_it_moves(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ok(data_dir, "team", "create", "search", "--tier", "gold")
    moves = [
        {"tier": "bronze", "from_seconds": 9.5, "to_seconds": 12.25},
        {"tier": "gold", "from_seconds": None, "to_seconds": 1.5},
    ]
    answer = made | {"max_pause_moves": moves}
    monkeypatch.setattr("gateway.cli.admin._call", lambda *_, **__: answer)
    for change in (
        ["team", "create", "x"],
        ["team", "set", "x", "--tier", "gold"],
        ["tier", "set", "gold", "--weight", "2"],
    ):
        lines = run(data_dir, *change).stdout.splitlines()
        assert lines[-2:] == [
            "maximum pause of tier bronze with an empty queue: 9.50 s -> 12.2 s",
            "maximum pause of tier gold with an empty queue: none -> 1.50 s",
        ]
