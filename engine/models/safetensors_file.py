"""Write and check safetensors files without torch: eight bytes of length, a JSON header, then the tensors' bytes.

The file is written by hand for two reasons. numpy has no bfloat16. And the bytes here are a function of the tensors
alone, so that a file's SHA-256 can be compared. Format: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class DamagedFile(ValueError):
    """A safetensors file is cut short, or its header does not describe its bytes. The message is one line."""


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 values as the bit patterns of bfloat16 (uint16, same shape), rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: np.ndarray = (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)
    return rounded


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: Literal["F32", "BF16"]) -> None:
    """Write float32 arrays as `dtype`, in the order of their names. Raises OSError when the file cannot be written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        num_bytes = tensors[name].size * ELEMENT_BYTES[dtype]
        header[name] = {
            "dtype": dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in sorted(tensors):
            values = np.ascontiguousarray(tensors[name], dtype="<f4")
            file.write((bfloat16_bits(values).astype("<u2") if dtype == "BF16" else values).tobytes())


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors by name. Raises OSError; DamagedFile when the header does not fit the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise DamagedFile(f"{path} is not a complete safetensors file")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise DamagedFile(f"{path} has an unreadable safetensors header") from None
    if size != 8 + length + end:
        raise DamagedFile(
            f"{path} has {size} bytes where its header describes {8 + length + end}: cut short or damaged"
        )
    return shapes
