"""The wheel carries everything: installed alone into a fresh environment, `terazi serve` answers a request."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.e2e.server import Server

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git tracks, so that nothing untracked slips in."""
    source = tmp_path_factory.mktemp("source")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new environment with the wheel; third-party packages come from this one's site-packages, our code does not."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home), "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    # A .pth line appends the path, but runs no .pth files of that directory: the editable install stays out.
    (site / "third_party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    yield home / "bin" / "python"


def test_the_wheel_has_our_packages_and_their_data_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"policies", "engine", "tenants", "gateway", "migrations"}
    for name in (
        "gateway/demo/trace.jsonl",
        "gateway/demo/NOTICE.txt",
        "gateway/reports/report.html.jinja",
        "engine/device/step_profile_fixed.json",
        "migrations/env.py",
    ):
        assert name in names, name
    assert any(name.startswith("migrations/versions/") and name != "migrations/versions/__init__.py" for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)
    assert not any(name.endswith(".patch") for name in names)


def test_serve_runs_from_the_installed_wheel(
    fresh_python: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = (
        "import gateway.serve, migrations, engine; print(gateway.serve.__file__, migrations.__file__, engine.__file__)"
    )
    done = subprocess.run([fresh_python, "-c", where], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(fresh_python.parent.parent)) == 3

    help_text = subprocess.run(
        [fresh_python.with_name("terazi"), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert help_text.returncode == 0, help_text.stderr
    assert "quota" in help_text.stdout

    monkeypatch.setattr("tests.support.e2e.server.sys.executable", str(fresh_python))
    monkeypatch.chdir(tmp_path)
    server = Server(tmp_path / "data", cache_dir)
    server.environment = {name: value for name, value in server.environment.items() if name != "PYTHONPATH"}
    try:
        server.start()
        key = server.make_key()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        text = client.completions.create(model="tiny-random", prompt="x", max_tokens=2, extra_body={"ignore_eos": True})
        assert text.usage is not None
        assert text.usage.completion_tokens == 2
        root = str(ROOT)
        maps = Path(f"/proc/{server.info['pid']}/cmdline").read_bytes()
        assert os.fsencode(str(fresh_python)) in maps
        assert root not in server.log
        assert server.stop() == 0
    finally:
        server.kill()
