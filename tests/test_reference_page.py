"""docs/reference.md and docs/operations.md against the code: error codes, exit codes, routes, reasons, outcomes; and
settings against those who read them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from engine.config import MODES, EngineConfig
from gateway import command, errors
from gateway.admin.app import AdminState, admin_app
from gateway.link.process import engine_config
from gateway.openai.app import public_app
from gateway.openai.state import not_ready_reasons
from gateway.settings.values import SETTINGS, load, setting
from policies.catalog import POLICIES
from tenants import errors as tenant_errors
from tenants.rows import Outcome
from tests.support.gateway.harness import Gateway, gateway

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = (ROOT / "docs" / "reference.md").read_text("utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
# What has its own errors: the commands, and what only they call.
NOT_PUBLIC = ("admin", "cli", "demo", "reports", "command.py", "outputs.py", "store.py", "serve.py", "lock.py")
# What no caller meets: a name of the envelope's base class, and the code of a row whose client is not there.
NEVER_ANSWERED = {"client_closed"}


def section(page: str, heading: str) -> str:
    """A page's text from a heading to the next one."""
    text = page.partition(f"\n{heading}\n")[2]
    assert text, heading
    return re.split(r"^#+ ", text, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of a section's tables, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {index - 1 for index, cells in enumerate(found) if set("".join(cells)) == {"-"}}
    return [cells for index, cells in enumerate(found) if index not in heads and index - 1 not in heads]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def raised(paths: list[Path], kinds: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """(class, code) of every call that makes one of these errors with a code that can be read, or with its default."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds):
                continue
            kind = kinds[node.func.id]
            codes = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if not codes:
                yield kind, getattr(kind, "default_code", None) or kind.code
            elif isinstance(codes[0], ast.Constant):
                yield kind, str(codes[0].value)


def public_codes() -> set[tuple[str, str, str]]:
    """(status, type, code) of whatever the public listener may answer."""
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    kinds = {name: kind for name, kind in kinds.items() if issubclass(kind, errors.GatewayError)}
    paths = [
        path
        for path in sorted((ROOT / "gateway").rglob("*.py"))
        if path.relative_to(ROOT / "gateway").parts[0] not in NOT_PUBLIC
    ]
    found = {(str(kind.status), kind.type, code) for kind, code in raised(paths, kinds)}
    # Codes that are handed on: of keys, of limits, and of what the engine would not take.
    for denied in (tenant_errors.InvalidKey, *tenant_errors.KeyRevoked.__subclasses__(), tenant_errors.KeyRevoked):
        found.add(("401", "authentication_error", denied.code))
    found.add(("401", "authentication_error", tenant_errors.KeyExpired.code))
    found |= {("429", "rate_limit_error", name) for name in ("requests", "tokens", "concurrent_limit")}
    engine = re.findall(r'return "(\w+)", ', (ROOT / "engine" / "step" / "core.py").read_text("utf-8"))
    known = {code for _, _, code in found}
    found |= {("400", "invalid_request_error", code) for code in engine if code not in known}
    return {row for row in found if row[2] not in NEVER_ANSWERED}


def test_every_public_error_code_is_in_the_reference() -> None:
    table = rows(section(REFERENCE, "### Errors"))
    shown = {(row[0], row[1], code) for row in table if len(row) == 3 for code in names(row[2])}
    assert shown == public_codes()


def test_every_admin_error_code_is_in_the_reference() -> None:
    kinds: dict[str, Any] = {"BadRequest": errors.BadRequest, "Unauthenticated": errors.Unauthenticated}
    admin = list((ROOT / "gateway" / "admin").glob("*.py"))
    codes = {(kind.status, code) for kind, code in raised(admin, kinds)}
    of_tenants: dict[str, Any] = {name: getattr(tenant_errors, name) for name in ("Invalid", "NotFound", "Conflict")}
    statuses = {tenant_errors.Invalid: 400, tenant_errors.NotFound: 404, tenant_errors.Conflict: 409}
    tenants = [ROOT / "tenants" / f"{name}.py" for name in ("teams", "keys", "tiers", "quotas", "names", "audit")]
    codes |= {(statuses[kind], code) for kind, code in raised(tenants, of_tenants)}
    table = rows(section(REFERENCE, "### Errors of the admin listener"))
    shown = {(int(row[0]), code) for row in table for code in names(row[1])}
    assert shown >= codes
    only_shown = {code for _, code in shown - codes}
    source = "".join(path.read_text("utf-8") for path in [*admin, ROOT / "gateway" / "errors.py"])
    assert all(f'"{code}"' in source for code in only_shown)


def test_every_exit_code_is_in_the_reference() -> None:
    shown = {int(row[0]) for row in rows(section(REFERENCE, "### Exit codes"))}
    interrupted = 130  # 128 + SIGINT, as a shell has it
    constants = {value for name, value in vars(command).items() if name.startswith("EXIT_")}
    assert shown == {0, interrupted} | constants
    listed = re.findall(r"(?:^|   )(\d) [a-z]", (command.__doc__ or ""), re.M)
    assert {int(code) for code in listed} == {0} | constants
    assert f"return {interrupted}" in (ROOT / "gateway" / "cli" / "main.py").read_text("utf-8")


def documented_routes() -> set[tuple[str, str]]:
    """(method, path) of every route that the section HTTP names."""
    text = REFERENCE.partition("\n## HTTP\n")[2]
    found = set()
    for methods, path in re.findall(r"`((?:GET|POST|PUT|PATCH)(?:, (?:GET|POST|PUT|PATCH))*) (/[^`]*)`", text):
        found |= {(method, re.sub(r"\{.*?\}", "{}", path)) for method in methods.split(", ")}
    return found


def served_routes(app: Any) -> set[tuple[str, str]]:
    return {
        (method, re.sub(r"\{.*?\}", "{}", route.path)) for route in app.routes for method in route.methods - {"HEAD"}
    }


async def test_every_route_is_in_the_reference() -> None:
    async with gateway() as g:
        database: Any = type("Database", (), {"url": "sqlite+aiosqlite:////nowhere/t.db"})()
        state = AdminState(token="t" * 16, database=database, snapshot_holder=g.holder)  # type: ignore[arg-type]
        assert documented_routes() == served_routes(public_app(g.state)) | served_routes(admin_app(state))


async def test_every_reason_not_to_be_ready_is_described() -> None:
    shown = {names(row[0])[0] for row in rows(section(OPERATIONS, "### Why a server is not ready"))}
    async with gateway() as g:
        assert shown == all_reasons(g)


def all_reasons(g: Gateway) -> set[str]:
    """The keys of the facts that `not_ready_reasons` looks at."""
    source = ast.parse(Path(not_ready_reasons.__code__.co_filename).read_text("utf-8"))
    (function,) = [
        node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == not_ready_reasons.__name__
    ]
    found = {
        key.value
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    assert found >= set(not_ready_reasons(g.state))
    return found


def test_every_outcome_is_described() -> None:
    shown = [names(row[0])[0] for row in rows(section(OPERATIONS, "### Outcomes"))]
    assert sorted(shown) == sorted(get_args(Outcome))


def test_choices_are_those_of_the_code() -> None:
    assert setting("policy").choices == tuple(POLICIES)
    assert setting("memory_preemption").choices == MODES


def test_when_nobody_reads_a_setting_then_it_is_named() -> None:
    read = set()
    for path in (ROOT / "gateway").rglob("*.py"):
        if path.parts[-2:] == ("settings", "values.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
    read |= {"store_url"}  # by Settings.database_url
    assert {row.name for row in SETTINGS} - read == set()


def test_the_engine_gets_every_setting_that_it_has() -> None:
    settings = load({}, {})
    own = {"max_outbox_bytes", "levels", "fairness_window_ms"}  # constants without a setting
    given = engine_config(settings)
    source = ast.parse((ROOT / "gateway" / "link" / "process.py").read_text("utf-8"))
    (call,) = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "EngineConfig"
    ]
    assert {keyword.arg for keyword in call.keywords} == set(EngineConfig.__struct_fields__) - own
    assert given == EngineConfig(), "settings and engine have the same defaults"
