"""Who writes what of a sequence, read from the source: each record has one owner (engine/request.py names them)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "engine"
# record -> modules that may write its fields. `Sequence.memory` and the others are made with the sequence and stay.
OWNERS = {
    "memory": ("memory",),
    "pause": ("step/pauses.py",),
    "bill": ("memory/billing.py",),
}
SCHEDULER = "step/scheduler.py"
# Fields of a sequence itself; those that other classes have too are left to the types.
SEQUENCE_FIELDS = {
    "is_running", "level", "first_step_us", "first_token_us", "last_us", "ended_us", "num_preemptions",
    "num_promotions", "finish_reason",
}  # fmt: skip


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Every attribute that is assigned, augmented or deleted."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del):
                    yield part


def trespasses(name: str, source: str) -> list[str]:
    """Writes of another owner's record in the module `name` (a path below engine/)."""
    found = []
    for attribute in written(ast.parse(source)):
        holder = attribute.value
        if isinstance(holder, ast.Attribute) and holder.attr in OWNERS and not _is_self(holder.value):
            if not name.startswith(OWNERS[holder.attr]):
                found.append(f"{name}:{attribute.lineno} writes {ast.unparse(attribute)}")
        elif (
            attribute.attr in SEQUENCE_FIELDS
            and _knows_sequences(source)
            and not _is_self(holder)
            and name != SCHEDULER
        ):
            found.append(f"{name}:{attribute.lineno} writes {ast.unparse(attribute)}")
    return found


def _knows_sequences(source: str) -> bool:
    """Other classes have fields of these names too; a module without sequences writes those."""
    return "class _Record" not in source


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@pytest.mark.parametrize("path", sorted(ENGINE.rglob("*.py")), ids=lambda path: str(path.relative_to(ENGINE)))
def test_no_module_writes_another_owners_record(path: Path) -> None:
    assert trespasses(str(path.relative_to(ENGINE)), path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("step/scheduler.py", "sequence.memory.num_claim = 3"),
        ("step/scheduler.py", "sequence.bill.device_us += 3"),
        ("memory/mover.py", "sequence.pause.bound_us = 3"),
        ("memory/mover.py", "sequence.is_running = False"),
        ("process/samples.py", "a, sequence.level = 1, 2"),
    ],
)
def test_when_a_record_is_written_elsewhere_it_is_seen(name: str, source: str) -> None:
    assert len(trespasses(name, source)) == 1


def test_the_scheduler_knows_the_manager_and_nothing_else_of_kv() -> None:
    tree = ast.parse((ENGINE / SCHEDULER).read_text("utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name for name in modules if name.startswith("engine.memory")} == {"engine.memory.manager"}


def test_the_kv_memory_knows_neither_the_step_nor_the_process() -> None:
    for path in sorted((ENGINE / "memory").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith(("engine.step", "engine.process", "engine.device")), path
