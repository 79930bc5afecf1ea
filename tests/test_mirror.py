"""Tests lie where their modules lie: `engine/memory/room.py` is tested by `tests/engine/memory/test_room.py`.

Their names are short enough to be read in one line of pytest's output.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "engine", "gateway", "tenants")
NAME_MAX = 60  # characters after `test_`
# Modules without a test file of their name, and why.
ELSEWHERE = {
    "engine/__main__.py": "starts engine.process.loop; tests/engine/process/test_engine_process.py runs it",
    "engine/clock.py": "two clocks of a few lines; every test of the engine moves one",
    "engine/config.py": "data; tests/engine/process/test_assembly.py says which values are refused",
    "engine/device/kv_canary.py": "tested with the copies it watches, also on a GPU: test_copy_engine.py",
    "engine/device/weights.py": "tested through what it is for: test_model.py, native/test_linear.py",
    "engine/memory/moves.py": "values between planner and mover",
    "engine/parts.py": "data",
    "engine/plan.py": "data",
    "engine/sim/parts.py": "puts the simulated engine together; test_simulate.py and test_engine_process.py start it",
    "engine/wire/messages.py": "data; test_framing.py sends them",
    "gateway/admin/answers.py": "the shapes of answers, compared whole in test_calls.py",
    "gateway/admin/client.py": "an adapter of httpx; tests/gateway/cli and tests/e2e call a server with it",
    "gateway/admin/state.py": "data",
    "gateway/cli/__main__.py": "starts gateway.cli.main",
    "gateway/cli/admin.py": "commands over the admin API, run by test_main.py and test_archived.py",
    "gateway/cli/options.py": "options that commands share; test_main.py and test_reference.py see them",
    "gateway/demo/server_process.py": "a subprocess; tests/e2e/test_demo.py and test_signals.py start it",
    "gateway/settings/table.py": "data; test_values.py reads all of it",
    "gateway/standard_files.py": "what the system does with closed and full files: tests/e2e/test_standard_files.py",
    "policies/sequences.py": "data",
    "tenants/errors.py": "data",
    "tenants/reports/queries.py": "parts of SQL statements; every report is compared with a plain loop",
    "tenants/rows.py": "data",
    "tenants/tables.py": "data; test_migrate.py compares it with the schema that migrations make",
}


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                yield path.relative_to(ROOT)


def mirror(module: Path) -> Path:
    return Path("tests") / module.parent / f"test_{module.name}"


def test_each_module_has_a_test_file_of_its_name() -> None:
    found = {str(module): (ROOT / mirror(module)).exists() for module in modules()}
    lacking = [f"{name}: {mirror(Path(name))}" for name, exists in found.items() if not exists]
    assert [line for line in lacking if line.partition(":")[0] not in ELSEWHERE] == []


def test_no_exception_is_stale() -> None:
    names = {str(module) for module in modules()}
    assert [name for name in ELSEWHERE if name not in names] == [], "no such module"
    assert [name for name in ELSEWHERE if (ROOT / mirror(Path(name))).exists()] == [], "it has its test file now"
    assert all(ELSEWHERE.values())


def test_a_folder_of_tests_is_a_folder_of_modules() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    mirrored = [folder for folder in folders if folder.parts and folder.parts[0] in PACKAGES]
    assert [str(folder) for folder in sorted(mirrored) if not (ROOT / folder).is_dir()] == []


def names_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name.removeprefix("test_")


def test_the_name_of_a_test_has_at_most_sixty_characters() -> None:
    names = {name for path in (ROOT / "tests").rglob("test_*.py") for name in names_of(path)}
    assert sorted(name for name in names if len(name) > NAME_MAX) == []
