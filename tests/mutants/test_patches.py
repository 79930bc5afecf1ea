"""The stored bugs fit the tree as it is. Whether the tests notice them, `make mutants` finds out."""

import ast
import fnmatch
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.mutants import run
from tests.mutants.run import FOLDER, ROOT, Mutant, MutantError, apply_patch, read_mutant, stored_mutants

PATCHES = sorted(FOLDER.glob("*.patch"))
DIFF = """\
# breaks: two and two are five
# test: tests/test_sums.py::test_two_and_two
diff --git a/sums.py b/sums.py
--- a/sums.py
+++ b/sums.py
@@ -1 +1 @@
-TWO_AND_TWO = 4
+TWO_AND_TWO = 5
"""
SUMS_TEST = "import sums\n\ndef test_two_and_two():\n    assert sums.TWO_AND_TWO == 4\n"


def defined_tests(path: Path) -> set[str]:
    """Names of the test functions of a file, those of classes as `Class::test`."""
    tree = ast.parse(path.read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, functions)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            names |= {f"{owner.name}::{node.name}" for node in owner.body if isinstance(node, functions)}
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_stored_bug_applies_and_names_tests_that_exist(path: Path) -> None:
    mutant = read_mutant(path)
    apply_patch(mutant, ROOT, is_check=True)
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert file.startswith("tests/") and (ROOT / file).is_file(), test
        assert name.partition("[")[0] in defined_tests(ROOT / file), test


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_stored_bug_changes_the_product_not_the_tests(path: Path) -> None:
    changed = [line[6:] for line in path.read_text("utf-8").splitlines() if line.startswith("+++ b/")]
    assert changed and not any(name.startswith("tests/") for name in changed)


def test_there_are_stored_bugs() -> None:
    assert len(stored_mutants()) == len(PATCHES) > 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("# breaks", "# brakes"),
        lambda text: text.replace("# test: tests/test_sums.py::test_two_and_two\n", ""),
        lambda text: text.replace("two and two are five", ""),
        lambda text: text.replace("# test", "# breaks"),
        lambda text: "two and two\n" + text,
    ],
)
def test_when_a_header_line_is_wrong_then_it_is_told(spoil: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "X1.patch"
    path.write_text(DIFF)
    assert read_mutant(path) == Mutant(path, "two and two are five", ("tests/test_sums.py::test_two_and_two",))
    path.write_text(spoil(DIFF))
    with pytest.raises(MutantError, match=r"X1\.patch"):
        read_mutant(path)


@pytest.mark.parametrize("is_in_a_repository", [False, True])
def test_a_patch_applies_in_an_export_too(is_in_a_repository: bool, tmp_path: Path) -> None:
    """In a folder of another repository git skips the files of a patch, and says nothing."""
    if is_in_a_repository:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    tree = tmp_path / "export"
    tree.mkdir()
    (tmp_path / "X1.patch").write_text(DIFF)
    mutant = read_mutant(tmp_path / "X1.patch")
    (tree / "sums.py").write_text("TWO_AND_TWO = 4\n")
    apply_patch(mutant, tree, is_check=True)
    assert (tree / "sums.py").read_text() == "TWO_AND_TWO = 4\n"
    apply_patch(mutant, tree)
    assert (tree / "sums.py").read_text() == "TWO_AND_TWO = 5\n"
    with pytest.raises(MutantError, match=r"X1\.patch does not apply"):
        apply_patch(mutant, tree, is_check=True)


@pytest.mark.parametrize(
    "test, status, told",
    [
        (SUMS_TEST, 0, "X1: noticed"),
        (SUMS_TEST.replace("== 4", "> 0"), 1, "X1: SURVIVED"),
        (SUMS_TEST.replace("== 4", "== 3"), 2, ""),
        (SUMS_TEST.replace("import sums", "import sums\nassert sums.TWO_AND_TWO == 4"), 1, "X1: pytest ended with 4"),
        (SUMS_TEST.replace("test_two_and_two", "test_two"), 2, ""),
    ],
    ids=["noticed", "survived", "red without it", "not collected", "no such test"],
)
def test_the_runner_says_whether_a_bug_is_noticed(
    test: str,
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sums.py").write_text("TWO_AND_TWO = 4\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(test)
    (tmp_path / "X1.patch").write_text(DIFF)
    for name, value in (("ROOT", tmp_path), ("FOLDER", tmp_path), ("_PACKAGES", ("tests",))):
        monkeypatch.setattr(run, name, value)
    assert run.main(["--only", "X1"]) == status
    out, error = capsys.readouterr()
    assert told in out and bool(error) == (status == 2)
    assert out.endswith(f"\n{1 - status} passed, {status} failed\n" if status < 2 else "")


def test_a_bug_that_is_not_stored_cannot_be_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--only", "nothing"]) == 2
    assert "no such mutant: nothing" in capsys.readouterr().err


def test_the_wheel_carries_no_patches() -> None:
    """`tests/e2e/test_packaging.py` builds one and looks."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    packages = find_packages(str(ROOT), include=tool["packages"]["find"]["include"])
    assert packages and not any(name.split(".")[0] == "tests" for name in packages)
    patterns = [pattern for patterns in tool["package-data"].values() for pattern in patterns]
    assert not any(fnmatch.fnmatch("Q1.patch", pattern) for pattern in patterns)
