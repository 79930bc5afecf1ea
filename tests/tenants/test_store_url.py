"""Store URLs: every usual spelling is served, and no output holds a password; a path's letters are only letters."""

import asyncio
import json
import logging
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text as sql
from sqlalchemy.engine import make_url
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.logs import JsonFormatter, TextFormatter
from gateway.settings.file import SettingsError
from gateway.settings.values import as_rows, load
from tenants import migrate
from tenants.database import Database, make_engine, sqlite_path, sqlite_url
from tenants.errors import Invalid, StoreUnreachable
from tenants.store_url import masked, normalised, scrubbed, without_secrets

SECRET = "S3cret"
# Wherever a password may stand, also where it should not.
WITH_SECRET = [
    "u:S3cret@127.0.0.1/t",
    "postgresql+asyncpg:///t?host=127.0.0.1&port=1&user=u&password=S3cret",
    "postgresql://u:S3cret@127.0.0.1:1/t",
    "postgres://u:S3cret@127.0.0.1:1/t?sslmode=disable",
    "postgresql://u:S3cret%40x@127.0.0.1:1/t",
    "postgresql://u:S3cret@x@127.0.0.1:1/t",
    "postgresql://u:S3cret/x@127.0.0.1:1/t",
    "postgresql://u:S3cret?x@127.0.0.1:1/t",
    "postgresql://u:S3cret#x@127.0.0.1:1/t",
    "postgresql://u:S3cret",
    "postgresql://u:12?S3cret@h/t",
    "postgresql://h?password=S3cret&user=a@b",
    "postgresql://h/t?passwd=S3cret",
    "postgresql:/u:S3cret@h/t",
    "postgresql//u:S3cret@h/t",
    "postgresql+psycopg2://u:S3cret@h/t",
    "mysql://u:S3cret@h/t",
    "S3cret://u@h/t",
    "S3cret",
    "password=S3cret host=127.0.0.1 dbname=t",
    "postgresql://u:S3cret@h/t\nx",
    "postgresql://u:S3cret@[::1/t",
    "postgresql://u:S3cret@127.0.0.1:99999/t",
    " postgresql://u:S3cret@127.0.0.1:1/t \n",
    "sqlite+pysqlcipher://:S3cret@/x.db",
    "sqlite:///x.db?key=S3cret",
]


def run(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(tmp_path / "data")])


@pytest.mark.case("H32")
@pytest.mark.parametrize("url", [url for url in WITH_SECRET if not url.startswith("sqlite:")])
@pytest.mark.parametrize("name", ["environment", "file"])
def test_no_output_holds_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str, name: str
) -> None:
    if name == "file":
        file = tmp_path / "terazi.yaml"
        file.write_text(f"store: {{url: {json.dumps(url)}}}\n")
        monkeypatch.setenv("TERAZI_CONFIG", str(file))
    else:
        monkeypatch.setenv("TERAZI_STORE_URL", url)
    for arguments in (["config", "show"], ["config", "show", "--json"], ["usage", "report"], ["team", "list"]):
        done = run(tmp_path, *arguments)
        assert done.exit_code in (0, 2, 6), done.stderr
        assert done.exit_code == 0 or done.stderr.count("\n") == 1
        said = (done.stdout + done.stderr + caplog.text).replace("S3cret://", "")  # a scheme is no password
        assert SECRET not in said and "3cret" not in said
    assert not (tmp_path / "data").exists()


@pytest.mark.case("H32")
@pytest.mark.parametrize("url", WITH_SECRET)
def test_a_masked_url_holds_no_password(url: str) -> None:
    assert SECRET not in masked(url).replace("S3cret://", "")
    try:
        normalised(url)
    except Invalid as error:
        assert SECRET not in error.message.replace("S3cret://", "")


@pytest.mark.case("H32")
def test_what_is_no_secret_is_shown() -> None:
    # An @ after the host, or a letter that is not printed: the password may have begun before.
    for url in ("postgresql://u:p@1/2@h/t", "postgresql://u:p@1?host=2@h", "postgresql://u:p@1/\x1b[2Jt"):
        assert masked(url) == "postgresql://***"
    assert masked("postgresql://u:x@db.example:5432/terazi?sslmode=require&weird=y") == (
        "postgresql://u:***@db.example:5432/terazi?sslmode=require&weird=***"
    )
    assert masked("sqlite:////srv/a@b/x.db") == "sqlite:////srv/a@b/x.db"
    assert (masked(""), masked("u:p@h/t"), masked("postgresql://u:p@h@h/t")) == ("", "***", "postgresql://***")


PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=12)


@pytest.mark.case("H32")
@given(
    password=PASSWORDS,
    host=st.sampled_from(["h", "127.0.0.1:5", "[::1]:5", ""]),
    tail=st.sampled_from(["/t", "/t?ssl=x"]),
)
def test_a_raw_password_never_shows_through(password: str, host: str, tail: str) -> None:
    """Whatever letters it has, also those that should have been escaped."""
    shown = masked(f"postgresql://user:{password}@{host}{tail}")
    for start in range(len(password) - 3):
        part = password[start : start + 4]
        if part not in f"postgresql://user:***@{host}{tail}":
            assert part not in shown


@pytest.mark.case("H32")
@pytest.mark.parametrize(
    ("given_url", "served"),
    [
        ("postgres://u:p@h/t", "postgresql+asyncpg://u:p@h/t"),
        ("postgresql://u:p@h/t", "postgresql+asyncpg://u:p@h/t"),
        ("POSTGRES://u:p@h:5/t\n", "postgresql+asyncpg://u:p@h:5/t"),
        ("postgresql+asyncpg://u:p%2Fq@h/t", "postgresql+asyncpg://u:p%2Fq@h/t"),
        ("postgres://u:p@h/t?sslmode=require&connect_timeout=3", "postgresql+asyncpg://u:p@h/t?ssl=require&timeout=3"),
        ("sqlite:////srv/x.db", "sqlite+aiosqlite:////srv/x.db"),
    ],
)
def test_the_usual_spellings_are_served(given_url: str, served: str) -> None:
    assert normalised(given_url) == served
    assert load({"store_url": given_url}, {}).database_url == served


@pytest.mark.case("H32")
@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "u:p@h/t",
            "store_url (flag --store-url): The store URL cannot be read; write postgresql://USER:PASSWORD@HOST",
        ),
        ("mysql://u:p@h/t", "begins with mysql://; Terazi serves PostgreSQL as postgresql+asyncpg://"),
        ("postgresql+psycopg2://h/t", "begins with postgresql+psycopg2://"),
        ("postgres://h/t?channel_binding=require", "has the parameter 'channel_binding'"),
        ("postgres://h:0/t", "port is not a number from 1 to 65535"),
        ("postgres://h:65536/t", "port is not a number from 1 to 65535"),
        ("postgres:///t?host=h&port=x", "port is not a number from 1 to 65535"),
        ("postgres://h/t?timeout=soon", "parameter timeout is not a number"),
    ],
)
def test_what_is_not_served_is_one_line_with_the_cure(url: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load({"store_url": url}, {})
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.case("H32")
@pytest.mark.parametrize(
    "arguments", [["usage", "report"], ["team", "list"], ["team", "create", "a"], ["db", "upgrade"]]
)
def test_a_server_that_does_not_answer_is_6_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("TERAZI_STORE_URL", "postgres://u:S3cret@127.0.0.1:1/t")
    done = run(tmp_path, *arguments)
    assert done.exit_code == 6
    assert done.stderr == "terazi: The database server at 127.0.0.1:1 cannot be used: Connection refused.\n"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("postgresql://h.invalid/t", "h.invalid:5432"),
        ("postgresql:///t?host=127.0.0.1&port=1", "127.0.0.1:1"),
        ("postgresql://[::1]:1/t", "[::1]:1"),
    ],
)
def test_the_address_is_the_one_that_was_asked_for(url: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncpg

    async def refuse(**options: object) -> None:
        assert options["timeout"] == 10.0
        raise OSError("no route; password S3cret")

    monkeypatch.setattr(asyncpg, "connect", refuse)

    async def connect() -> None:
        engine = make_engine(url, is_pooled=False)
        async with engine.connect():
            raise AssertionError("connected")

    with pytest.raises(StoreUnreachable) as refused:
        asyncio.run(connect())
    assert refused.value.message.startswith(f"The database server at {address} cannot be used: no route")


@pytest.mark.case("H32")
def test_what_a_driver_says_is_shown_without_the_secrets() -> None:
    url = "postgresql://u:S3%40cret@h/t?passfile=%2Fsecret%2Fone"
    said = without_secrets("S3@cret, S3%40cret and /secret/one do not open h", url)
    assert said == "***, *** and *** do not open h"


@pytest.mark.case("H32")
def test_log_lines_and_typed_arguments_hide_passwords(tmp_path: Path) -> None:
    text = "cannot reach postgresql://u:S3cret@h/t or h?x=1&password=S3cret; see http://h:80/a b@c"
    record = logging.LogRecord("terazi", logging.ERROR, "f", 1, "%s", (text,), None)
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(record)
        assert SECRET not in line and "http://h:80/a b@c" in line
    file = tmp_path / "terazi.yaml"
    file.write_text("store:\n  postgresql://u:S3cret@h/t: x\n")
    with pytest.raises(SettingsError) as refused:
        load({}, {}, file)
    assert SECRET not in str(refused.value) and str(file) in str(refused.value)
    assert scrubbed("write postgresql://USER:PASSWORD@HOST") == "write postgresql://USER:PASSWORD@HOST"


LETTERS = [
    "a?b=c",
    "a#b",
    "100%",
    "%41",
    "a&b;c=d",
    "a b ",
    "file:x",
    "a:b@c",
    "two\nlines",
    "ışık",
    "'\"`$",
    "\\x",
    ":memory:",
]


@pytest.mark.case("H33")
@pytest.mark.parametrize("name", LETTERS)
def test_a_directorys_letters_mean_nothing(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    for arguments in (["team", "create", "one"], ["team", "list"], ["usage", "report"], ["db", "upgrade"]):
        done = CliRunner().invoke(app, [*arguments, "--data-dir", str(directory), "--json"])
        assert done.exit_code == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (directory / "terazi.db").stat().st_size > 0
    with sqlite3.connect(directory / "terazi.db") as connection:
        assert connection.execute("SELECT name FROM teams").fetchall() == [("one",)]
    connection.close()


@pytest.mark.case("H33")
@pytest.mark.parametrize("name", LETTERS)
def test_a_path_comes_back_from_its_url(name: str) -> None:
    path = Path("/srv") / name / "terazi.db"
    assert sqlite_path(sqlite_url(path)) == path
    assert make_url(sqlite_url(path)).database == str(path)
    assert load({"data_dir": f"/srv/{name}"}, {}).database_url == sqlite_url(path)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(SettingsError, match="TERAZI_DATA_DIR: it is not UTF-8 text"):
        load({}, {"TERAZI_DATA_DIR": "/srv/\udcff"})
    with pytest.raises(SettingsError, match="TERAZI_STORE_URL: it has a NUL"):
        load({}, {"TERAZI_STORE_URL": "postgresql://u:S3cret@h/t\0"})


def test_as_rows_and_the_database_use_the_same_url() -> None:
    settings = load({"store_url": "postgres://u:S3cret@h/t"}, {})
    shown = {row["name"]: row["value"] for row in as_rows(settings)}["store_url"]
    assert shown == "postgres://u:***@h/t" and SECRET in settings.database_url


def test_a_reader_makes_no_database(tmp_path: Path) -> None:
    async def read() -> None:
        assert await migrate.current(sqlite_url(tmp_path / "none.db")) is None
        database = Database.read_only(sqlite_url(tmp_path / "none.db"))
        with pytest.raises(Exception, match="unable to open"):
            async with database.session() as connection:
                await connection.execute(sql("SELECT 1"))
        await database.dispose()

    asyncio.run(read())
    assert list(tmp_path.iterdir()) == []
