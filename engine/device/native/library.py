"""Load the native kernels, or say in one log line why torch does their work.

    TERAZI_NATIVE=off    use torch

A library is used only if a small self-test finds that its results agree with torch's.
"""

import ctypes
import logging
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.device.native.build import NativeError, compile_library, compiler, is_whole, library_path

logger = logging.getLogger(__name__)

SWITCH = "TERAZI_NATIVE"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
KEY_TILE = 64  # TILE in kernels.c
PANEL = 64  # PANEL in kernels.c
MAX_HEAD_DIM = 512
# At most so many rows of queries are computed over one packing of the keys: their sums fit the second-level cache.
QUERY_ROWS = 96


class Step(ctypes.Structure):
    """`Step` of kernels.c, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pool", "cos", "sin", "rows", "items", "tables")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_items", "layers", "block_size", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "dtype", "threads")),
    ]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one sequence's positions [start, start + count) in packed rows, and the blocks that hold its KV."""

    start: int
    count: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepArguments:
    """A `Step` and the arrays that it points into. The arrays are kept here so that they live as long as the `Step`."""

    step: Step
    arrays: tuple["array[int]", ...]
    num_rows: int


class Kernels:
    """The loaded library. The caller passes contiguous CPU tensors of one dtype; nothing here checks that."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`. Raises OSError or AttributeError when the file is not this library."""
        library = ctypes.CDLL(str(path))
        library.terazi_step_size.restype = ctypes.c_int64
        library.terazi_step_size.argtypes = []
        if library.terazi_step_size() != ctypes.sizeof(Step):
            raise OSError("its Step has another size")
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._add_norm = library.terazi_add_norm
        self._add_norm.argtypes = [pointer, pointer, pointer, pointer, count, count, ctypes.c_float, count, count]
        self._add_norm.restype = None
        self._rotate_write = library.terazi_rotate_write
        self._rotate_write.argtypes = [pointer, count, pointer]
        self._rotate_write.restype = None
        self._attend = library.terazi_attend
        self._attend.argtypes = [pointer, count, pointer, count, pointer]
        self._attend.restype = ctypes.c_int
        self._pack_linear = library.terazi_pack_linear
        self._pack_linear.argtypes = [pointer, pointer, count, count]
        self._pack_linear.restype = None
        self._linear = library.terazi_linear
        self._linear.argtypes = [pointer] * 4 + [count] * 6
        self._linear.restype = ctypes.c_int
        library.terazi_has_linear.restype = ctypes.c_int64
        library.terazi_has_linear.argtypes = []
        self.has_linear = bool(library.terazi_has_linear())  # matrix products in bfloat16

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add `delta` to `x` in place; return RMSNorm(x) * weight. All are [rows, hidden], `weight` is [hidden]."""
        out = torch.empty_like(x)
        self._add_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def rotate_write(self, arguments: StepArguments, layer: int, qkv: torch.Tensor) -> None:
        """Rotate the queries in `qkv` in place; write the rotated keys and the values to the pool.

        `qkv` is [rows, heads + 2 kv_heads, head_dim].
        """
        self._rotate_write(ctypes.byref(arguments.step), layer, qkv.data_ptr())

    def attend(self, arguments: StepArguments, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of rotated `queries` to `out` [rows, heads, head_dim].

        The queries are the first heads * head_dim columns of each row of `queries`. Raises MemoryError when there is no
        room for scratch.
        """
        if not self._attend(ctypes.byref(arguments.step), layer, queries.data_ptr(), queries.stride(0), out.data_ptr()):
            raise MemoryError("no memory for the scratch of attention")

    def pack_linear(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy bfloat16 weights, all of one shape [out, in] with an even `in`, to the layout that `linear` reads."""
        out_features, in_features = weights[0].shape
        padded = -(-out_features // PANEL) * PANEL
        packed = torch.empty((len(weights), padded, in_features), dtype=torch.bfloat16)
        for weight, part in zip(weights, packed, strict=True):
            self._pack_linear(weight.contiguous().data_ptr(), part.data_ptr(), out_features, in_features)
        return packed

    def linear(
        self,
        rows: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        out_features: int,
        *,
        gated: bool = False,
        wide: bool = False,
    ) -> torch.Tensor:
        """[rows, in] -> [rows, out] in bfloat16. With `wide` in float32, so that no sum is rounded to bfloat16.

        With `gated`, `packed` holds two weights, and the result is silu(first product) * second product. Works only
        where `has_linear` is true.
        """
        out = rows.new_empty((rows.shape[0], out_features), dtype=torch.float32 if wide else rows.dtype)
        self._linear(
            rows.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            out_features,
            rows.shape[1],
            gated,
            wide,
            torch.get_num_threads(),
        )
        return out


def query_tile(group: int) -> int:
    """How many positions an attention item spans at most, with `group` query heads for each KV head.

    A power of two that divides the key tile, and a function of the model alone.
    """
    tile = KEY_TILE
    while tile > 1 and tile * group > QUERY_ROWS:
        tile //= 2
    return tile


def step_arguments(
    pieces: Sequence[Piece], *, pool: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> StepArguments:
    """What the kernels need to know about a step. Its packed rows are the positions of `pieces`, in order.

    `pool` is a KVCache's pool; `cos` and `sin` are [context, head_dim], with the sine's first half negated.
    """
    layers, _, block_size, kv_heads, head_dim = pool.shape[1:]
    tile = query_tile(heads // kv_heads)
    rows, items, tables = array("i"), array("i"), array("i")
    first_row = 0
    for piece in pieces:
        end = piece.start + piece.count
        table = len(tables)
        tables.extend(piece.blocks[: -(-end // block_size)])
        position = piece.start
        while position < end:
            stop = min(end, (position // tile + 1) * tile)
            items.extend((first_row, stop - position, position, table))
            first_row += stop - position
            position = stop
        for position in range(piece.start, end):
            rows.extend((position, piece.blocks[position // block_size]))

    arrays = (rows, items, tables)
    step = Step(
        pool=pool.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        rows=rows.buffer_info()[0],
        items=items.buffer_info()[0],
        tables=tables.buffer_info()[0],
        num_rows=len(rows) // 2,
        num_items=len(items) // 4,
        layers=layers,
        block_size=block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=DTYPES[pool.dtype],
        threads=torch.get_num_threads(),
    )
    return StepArguments(step, arrays, first_row)


def is_wanted() -> bool:
    """Whether the setting leaves the kernels on."""
    return os.environ.get(SWITCH, "").strip().lower() not in ("off", "0", "false", "no")


def load(root: Path) -> Kernels:
    """The kernels: compiled under the cache root if they are not there yet, and tested. Raises NativeError."""
    path = library_path(root, found := compiler())
    if not is_whole(path):
        compile_library(path, found)
    try:
        kernels = Kernels(path)
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from None
    complaint = self_test(kernels)
    if complaint:
        raise NativeError(f"{path} computes something else than torch: {complaint}")
    return kernels


def choose(root: Path, device: torch.device, head_dim: int) -> Kernels | None:
    """The kernels if they can serve this device and head size, else None. One log line says which, and why."""
    kernels, reason = None, ""
    if not is_wanted():
        reason = f"{SWITCH} is off"
    elif device.type != "cpu":
        reason = f"the device is {device.type}"
    elif head_dim > MAX_HEAD_DIM:
        reason = f"heads of {head_dim} dimensions are too large"
    else:
        try:
            kernels = load(root)
        except NativeError as error:
            reason = str(error)
    if kernels is None:
        logger.info("native kernels are not used: %s", reason)
    else:
        logger.info("native kernels are used")
    return kernels


def self_test(kernels: Kernels) -> str:
    """The first kernel whose result differs from torch's by more than rounding, or "" if all agree."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = dtype, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        x, delta, weight = draw(3, 100), draw(3, 100), draw(100)
        total = x + delta
        normed = kernels.add_norm(x, delta, weight, 1e-5)
        if not torch.equal(x, total) or not _is_close(
            normed, torch.nn.functional.rms_norm(total.float(), (100,), weight.float(), 1e-5), tolerance
        ):
            return f"RMSNorm in {dtype}"
        heads, kv_heads, dim, length = 6, 2, 64, 90
        blocks = list(range(6))[::-1]
        pool = draw(7, 2, 2, 16, kv_heads, dim)
        angles = torch.arange(length).unsqueeze(1) / (1 + torch.arange(dim // 2))
        cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], dim=1)
        qkv = draw(length, heads + 2 * kv_heads, dim)
        expected = _reference(qkv.float(), cos, sin, heads, kv_heads)
        for first, count in ((0, 89), (89, 1)):  # a chunk, then a generated token
            arguments = step_arguments([Piece(first, count, blocks)], pool=pool, cos=cos, sin=sin, heads=heads)
            rows = qkv[first : first + count]
            kernels.rotate_write(arguments, 1, rows)
            out = torch.empty((count, heads, dim), dtype=dtype)
            kernels.attend(arguments, 1, rows.flatten(1), out)
            if not _is_close(out, expected[first : first + count], tolerance):
                return f"attention in {dtype}"
    if kernels.has_linear:
        rows, gate, up, bias = draw(7, 34), draw(70, 34), draw(70, 34), draw(140)
        bias_gate, bias_up = bias.chunk(2)
        gate_rows, up_rows = (
            torch.nn.functional.linear(rows.float(), weight.float(), part.float())
            for weight, part in ((gate, bias_gate), (up, bias_up))
        )
        if not _is_close(kernels.linear(rows, kernels.pack_linear([gate]), bias_gate, 70), gate_rows, tolerance):
            return "linear"
        gated = kernels.linear(rows, kernels.pack_linear([gate, up]), bias, 70, gated=True)
        if not _is_close(gated, torch.nn.functional.silu(gate_rows) * up_rows, tolerance):
            return "gated linear"
    return ""


def _reference(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Rotary positions and causal attention in float32: [tokens, heads + 2 kv_heads, dim] -> [tokens, heads, dim]."""
    turned = qkv[:, : heads + kv_heads]
    swapped = torch.cat(turned.chunk(2, dim=-1)[::-1], dim=-1)
    turned = turned * cos.unsqueeze(1) + swapped * sin.unsqueeze(1)
    keys, values = (
        part.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1)
        for part in (turned[:, heads:], qkv[:, heads + kv_heads :])
    )
    attended = torch.nn.functional.scaled_dot_product_attention(
        turned[:, :heads].transpose(0, 1), keys, values, is_causal=True
    )
    return attended.transpose(0, 1)


def _is_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool(((got.float() - expected).abs() <= tolerance * (1 + expected.abs())).all())
