"""Which package may import which (docs/architecture.md), read from the source, and what a fresh interpreter loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "tenants", "engine", "gateway", "migrations")
OUR_IMPORTS = {
    "policies": {"policies"},
    "tenants": {"tenants", "policies", "migrations"},
    "engine": {"engine", "policies"},
    "gateway": {"gateway", "policies", "tenants", "engine"},
    "migrations": {"migrations", "tenants"},
}
LIBRARIES = {
    "policies": set(),
    "tenants": {"sqlalchemy", "aiosqlite", "asyncpg", "alembic", "msgspec"},
    "engine": {"msgspec", "torch", "numpy", "gguf", "safetensors", "tokenizers"},
    "gateway": {
        "starlette", "uvicorn", "uvloop", "httptools", "httpx", "typer", "rich", "yaml", "msgspec", "tokenizers",
        "jinja2", "markupsafe", "prometheus_client", "sqlalchemy",
    },
    "migrations": {"sqlalchemy", "alembic"},
}  # fmt: skip
# What decides must not be able to wait, look at a clock or draw.
IMPURE = {"asyncio", "time", "datetime", "random", "secrets", "os", "socket", "threading", "logging", "subprocess"}


def modules(package: str) -> Iterator[Path]:
    yield from sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Full names of everything a file imports, inside functions and type-checking blocks too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    found = list(modules(package))
    assert found
    for path in found:
        for name in imports_of(path):
            top = name.partition(".")[0]
            allowed = OUR_IMPORTS[package] | LIBRARIES[package] | sys.stdlib_module_names
            assert top in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_policies_are_pure() -> None:
    for path in modules("policies"):
        impure = {name for name in imports_of(path) if name.partition(".")[0] in IMPURE}
        assert impure == set(), f"{path.relative_to(ROOT)} imports {impure}"


def test_nobody_imports_the_gateway_and_the_engine_knows_no_asyncio() -> None:
    for package in ("policies", "tenants", "engine", "migrations"):
        for path in modules(package):
            assert not any(name.partition(".")[0] == "gateway" for name in imports_of(path)), path
    for path in modules("engine"):
        assert "asyncio" not in imports_of(path), path


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count too: a circle is two modules that are one."""
    files = {_name_of(path): path for package in PACKAGES for path in modules(package)}
    graph = {name: _targets(path, files) - {name} for name, path in files.items()}
    while leaves := [name for name, targets in graph.items() if not targets]:
        for leaf in leaves:
            del graph[leaf]
        for targets in graph.values():
            targets.difference_update(leaves)
    assert sorted(graph) == [], "these import each other, or something that does"


def test_only_the_device_folder_imports_torch() -> None:
    for path in modules("engine"):
        if not path.is_relative_to(ROOT / "engine" / "device"):
            assert not any(name.partition(".")[0] == "torch" for name in imports_of(path)), path


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _targets(path: Path, files: Mapping[str, Path]) -> set[str]:
    """The modules of ours that a file imports, or imports a name from."""
    found = set()
    for name in imports_of(path):
        module = name if name in files else name.rpartition(".")[0]
        if module in files:
            found.add(module)
    return found


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("gateway.cli.main", ("torch", "numpy", "sqlalchemy", "httpx", "uvicorn", "starlette")),
        ("gateway.serve", ("torch", "numpy", "gguf", "transformers")),
        ("gateway.demo.run", ("torch", "numpy")),
        ("gateway.prepare.worker", ("torch", "numpy", "sqlalchemy", "starlette", "uvicorn", "gateway.openai.state")),
        ("engine.process.loop", ("torch", "asyncio", "sqlalchemy", "starlette")),
        ("engine.models.store", ("torch",)),
        ("policies.catalog", ("torch", "asyncio", "sqlalchemy", "msgspec")),
        ("tenants.ledger", ("torch", "starlette", "uvicorn", "alembic")),
    ],
)
def test_a_fresh_interpreter_does_not_load(module: str, without: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*[name for name in {without!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
