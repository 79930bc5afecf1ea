"""The native library is compiled once, whole, and anew for another source, compiler or processor."""

import threading
from pathlib import Path

import pytest

from engine.device.native import build
from engine.device.native.build import compile_library, compiler, is_whole, library_path
from engine.device.native.library import Kernels, load, self_test
from tests.engine.device.native.test_library import fake_compiler


@pytest.mark.usefixtures("quick")
def test_it_is_compiled_once_and_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    load(tmp_path)
    path = library_path(tmp_path, compiler())
    assert [path] == list((tmp_path / "native").iterdir())
    whole, written = path.read_bytes(), path.stat().st_mtime_ns
    load(tmp_path)
    assert path.stat().st_mtime_ns == written
    for damaged in (b"", whole[: len(whole) // 2], whole[:5000] + b"x" + whole[5001:]):
        path.unlink()  # a mapped file may not change under the process
        path.write_bytes(damaged)
        assert not is_whole(path)
        assert self_test(load(tmp_path)) == ""
        assert is_whole(path)


@pytest.mark.usefixtures("quick")
def test_two_starts_at_once_end_with_one_whole_library(tmp_path: Path) -> None:
    path = library_path(tmp_path, compiler())
    threads = [threading.Thread(target=compile_library, args=(path, compiler())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path] == list(path.parent.iterdir())
    assert is_whole(path)
    Kernels(path)


def test_another_source_compiler_or_processor_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fake_compiler(tmp_path, "echo cc 1.0")
    paths = {library_path(tmp_path, str(found))}
    fake_compiler(tmp_path, "echo cc 1.1")
    paths.add(library_path(tmp_path, str(found)))
    monkeypatch.setattr(build, "processor", lambda: "flags: sse2")
    paths.add(library_path(tmp_path, str(found)))
    source = tmp_path / "other.c"
    source.write_text("int x;")
    monkeypatch.setattr(build, "SOURCE", source)
    paths.add(library_path(tmp_path, str(found)))
    assert len(paths) == 4
