"""Puts each stored single-line bug (`tests/mutants/*.patch`) into a copy of the tree, and expects its tests to fail.

    python -m tests.mutants.run [--only ID]...

A patch is the output of `git diff`, with two header lines before it:

    # breaks: what a user would see, in one sentence
    # test: tests/path.py::test_name [tests/other.py::test_name ...]

The tests must pass without the patch and fail with it. A test that cannot be collected is no failure: pytest's exit
status must be 1. One line is printed for each mutant, and `N passed, N failed` at the end; a mutant passes when its
tests noticed it. Exits with 1 when one did not pass, and with 2 when nothing could be tried.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
RUN_SECONDS_MAX = 600  # for one run of pytest
_PACKAGES = ("policies", "engine", "tenants", "gateway", "migrations", "tests")
_NOT_COPIED = {".git", ".venv", ".cache", ".make", "__pycache__", "build", "dist", "demo-out"}
_NUM_OUTPUT_LINES = 30  # of pytest's output, shown when something is wrong
_NOTICED = 1  # pytest: tests ran, and some failed


class MutantError(Exception):
    """A patch file is not as it should be, or the tree cannot be used."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One stored bug."""

    path: Path
    breaks: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def read_mutant(path: Path) -> Mutant:
    """Read a patch's header. Raises MutantError when a line of it is missing, empty or not the only one."""
    headers: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("diff "):
            break
        key, colon, value = line.removeprefix("#").partition(":")
        if not (line.startswith("#") and colon and value.strip()) or key.strip() in headers:
            raise MutantError(f"{path.name}: what is this line for? {line!r}")
        headers[key.strip()] = value.strip()
    if headers.keys() != {"breaks", "test"}:
        raise MutantError(f"{path.name}: the header is '# breaks: …' and '# test: …', and then the output of git diff")
    return Mutant(path, headers["breaks"], tuple(headers["test"].split()))


def stored_mutants() -> list[Mutant]:
    """All of them, by name. Raises MutantError."""
    return [read_mutant(path) for path in sorted(FOLDER.glob("*.patch"))]


def apply_patch(mutant: Mutant, tree: Path, *, is_check: bool = False) -> None:
    """Change `tree` by the patch, or only ask whether that could be done. Raises MutantError when it cannot.

    The tree may be a repository, lie in another one, or in none.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.parent)  # in an outer repository git would skip every file
    command = ["git", "-c", "apply.whitespace=nowarn", "apply", *(["--check"] if is_check else []), str(mutant.path)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise MutantError(f"{mutant.path.name} does not apply: {done.stderr.strip()}")


def tree_files(root: Path) -> Iterator[Path]:
    """What the project consists of, relative to its root: what git tracks or would track; without git, all but caches
    and environments.
    """
    listing = None
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    if listing is not None:
        yield from (
            Path(os.fsdecode(name)) for name in listing.split(b"\0") if name and (root / os.fsdecode(name)).is_file()
        )
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_COPIED and not name.endswith("_cache")]
        yield from ((Path(folder) / name).relative_to(root) for name in names)


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the project, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="terazi-mutant-") as folder:
        tree = Path(folder).resolve() / "tree"
        for name in tree_files(ROOT):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        yield tree


def python(tree: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in the copy. Its packages come before the installed ones, in every subprocess too, and no
    bytecode is written: a patch may leave a file's size and second as they were.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS_MAX,
    )


def run_tests(tree: Path, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run the named tests of the copy, all to their ends: with `-x` a test that cannot be collected looks like one that
    failed.
    """
    options = ["-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=short"]
    return python(tree, [*options, *tests])


def check_imports(tree: Path) -> None:
    """Raises MutantError when python would take another place's packages than the copy's."""
    lines = [f"import {name}; print({name}.__path__[0])" for name in _PACKAGES]
    done = python(tree, ["-c", "\n".join(lines)])
    places = done.stdout.split()
    if done.returncode or places != [str(tree / name) for name in _PACKAGES]:
        raise MutantError(f"the copy's packages are not the ones that are imported:\n{done.stdout}")


def verdict(mutant: Mutant) -> str:
    """Why the mutant does not pass; empty when its tests noticed it."""
    with copied_tree() as tree:
        try:
            apply_patch(mutant, tree)
            done = run_tests(tree, mutant.tests)
        except MutantError as error:
            return str(error)
        except subprocess.TimeoutExpired:
            return f"no verdict after {RUN_SECONDS_MAX} s"
    if done.returncode == _NOTICED:
        return ""
    if done.returncode == 0:
        return "SURVIVED"
    return f"pytest ended with {done.returncode}, which is no failed test\n{_tail(done.stdout)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description="Do the tests notice the stored bugs?")
    parser.add_argument("--only", metavar="ID", action="append", default=[], help="this mutant; may be given again")
    only = set(parser.parse_args(arguments).only)
    try:
        mutants = [mutant for mutant in stored_mutants() if not only or mutant.name in only]
        unknown = only - {mutant.name for mutant in mutants}
        if unknown:
            raise MutantError(f"no such mutant: {', '.join(sorted(unknown))}")
        if not mutants:
            raise MutantError("there are no mutants")
        with copied_tree() as tree:
            check_imports(tree)
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            done = run_tests(tree, tests)
        if done.returncode:
            raise MutantError(f"without a patch the tests do not pass\n{_tail(done.stdout)}")
    except (MutantError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"unpatched: the {len(tests)} named tests pass", flush=True)
    num_failed = 0
    for mutant in mutants:
        begun = time.monotonic()
        problem = verdict(mutant)
        num_failed += bool(problem)
        print(f"{mutant.name}: {problem or 'noticed'} ({time.monotonic() - begun:.1f} s): {mutant.breaks}", flush=True)
    print(f"{len(mutants) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_NUM_OUTPUT_LINES:])


if __name__ == "__main__":
    sys.exit(main())
