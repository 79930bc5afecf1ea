"""How SQL is written: expressions and bound parameters, never text put together from values."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    [*(ROOT / "tenants").glob("*.py"), *(ROOT / "gateway").glob("*.py"), *(ROOT / "migrations").rglob("*.py")]
)
# Numbers of ours, and words of ours: no value from outside reaches them.
ALLOWED = {'f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}"', 'f"PRAGMA journal_size_limit = {WAL_SIZE_LIMIT_BYTES}"'}
ALLOWED |= {'f"BEGIN {mode}"', 'f"PRAGMA schema_version = {version + 1}"'}
TAKES_SQL = {"execute", "executemany", "scalar", "exec_driver_sql", "text", "literal_column"}


def built_sql(source: str) -> list[str]:
    """Arguments of SQL calls that are put together from parts."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for argument in node.args[:1] if name in TAKES_SQL else []:
                is_format = isinstance(argument, ast.Call) and getattr(argument.func, "attr", "") == "format"
                is_sum = isinstance(argument, ast.BinOp) and isinstance(argument.op, ast.Add | ast.Mod)
                if isinstance(argument, ast.JoinedStr) or is_format or is_sum:
                    found.append(ast.get_source_segment(source, argument) or "?")
    return found


@pytest.mark.case("S02", "S03")
def test_no_sql_is_put_together_from_text() -> None:
    assert len(SOURCES) > 20
    for path in SOURCES:
        source = path.read_text()
        assert set(built_sql(source)) <= ALLOWED, path.name
        calls = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        assert not calls & {"like", "ilike", "notlike", "regexp_match"}, path.name


def test_the_check_sees_what_it_should() -> None:
    assert built_sql('c.execute(f"SELECT {x}")') == ['f"SELECT {x}"']
    assert len(built_sql('c.execute("SELECT " + x); text("a %s" % x); c.scalar("{}".format(x))')) == 3
    assert built_sql("c.execute(select(t).where(t.c.x == x))") == []
