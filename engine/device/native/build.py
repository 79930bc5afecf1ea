"""Compile `kernels.c` once with the machine's C compiler and keep the library in the cache.

* The library is for this processor alone (-march=native). Its name is a hash of the source, the flags, the compiler and
  the processor, so a machine that is given another machine's cache compiles again.
* The library is written under a temporary name and moved into place. So two processes that start together never see
  half a file.
* The file ends with a hash of what is before it, so that a damaged library is found and compiled again. The loader of
  shared libraries ignores these last bytes.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
COMPILERS = ("cc", "gcc")
# No -ffast-math and no implicit fusing: a row's bits must not depend on how the compiler cut a loop.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared")
THREADS = "-fopenmp"  # left out if compiling with it fails, as where the compiler has no OpenMP
COMPILE_TIMEOUT_SECONDS = 120


class NativeError(Exception):
    """The native kernels cannot be used. The message is one line that says why."""


def compiler() -> str:
    """The path of a C compiler: $CC, cc or gcc, the first that is found. Raises NativeError if none is."""
    for name in (os.environ.get("CC", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NativeError("no C compiler (cc or gcc) is on PATH")


def library_path(root: Path, compiler_path: str) -> Path:
    """Where the library of this source, compiler and processor is kept under the cache root.

    Raises NativeError when the compiler does not run.
    """
    version = _run([compiler_path, "--version"]).splitlines()
    parts = (SOURCE.read_text("utf-8"), *FLAGS, THREADS, compiler_path, *version[:1], platform.machine(), processor())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return root / "native" / f"kernels-{digest[:24]}.so"


def processor() -> str:
    """Model and instruction sets of the processor, as far as the operating system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def compile_library(target: Path, compiler_path: str) -> None:
    """Compile to `target`, which appears whole or not at all. Raises NativeError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as directory:
            built = Path(directory) / target.name
            command = [compiler_path, *FLAGS, THREADS, str(SOURCE), "-o", str(built), "-lm"]
            try:
                _run(command)
            except NativeError:
                _run([part for part in command if part != THREADS])
            content = built.read_bytes()
            built.write_bytes(content + hashlib.sha256(content).digest())
            os.replace(built, target)
    except OSError as error:
        raise NativeError(f"the library cannot be kept in {target.parent}: {error.strerror or error}") from None


def is_whole(path: Path) -> bool:
    """Whether the file ends with the hash of what is before it.

    Ask before loading: a truncated library can end the process that loads it.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode != 0:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise NativeError(f"{command[0]} failed with status {done.returncode}: {complaint}")
    return done.stdout
