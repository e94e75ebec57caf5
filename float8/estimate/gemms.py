"""The time of a layer's GEMMs.

For M tokens, K ``in_features``, N ``out_features``::

    GEMM          a @ b.T          rows  columns  contraction
    output        x_MK @ w_NK.T    M     N        K
    grad_input    g_MN @ w_KN.T    M     K        N
    grad_weight   g_NM @ x_KM.T    N     K        M

    flops    = 2 * rows * columns * contraction / busy
    computed = flops / (peak * efficiency(flops)) + 2 * rows * columns / bandwidth
    seconds  = max(computed, bytes / bandwidth) + launch
    bytes    = operand * (rows + columns) * contraction + 2 * rows * columns

with 2 bytes per operand element in bfloat16 and 1 in float8; results are bfloat16.

**Results are written after a tile's last product**, when nothing multiplies: their time is added to
that of the products, and matters where the contraction is short. This explains DeepGEMM's published
table with one rate and no other constant (`benchmarks/published.json`).

**Tiles and waves**: a GEMM runs as tiles of 128 by 256 or 128 by 128 results, one per processor at
a time, so ``busy`` is the part of all processors' time in which results that exist are computed ::

    busy = rows * columns / (tile * processors * waves / parts)
    waves = ceil(tiles * parts / processors)

A result of less than half a wave is split along its contraction in up to 8 parts. Their float32
sums are one tile per processor, 17 MB on an H100: they stay in its cache of 50 MB and count as
nothing. On a device whose processors are not known, ``busy`` is 1 and writes overlap.

A grouped GEMM multiplies each group of tokens by its expert's weight. It is priced as a GEMM with
these differences, for T tokens in E groups:

- Weights, and their gradients, have E matrices; every operand is read once.
- Each group's tokens fill whole tiles of 128, along the rows of output and grad_input and along the
  contraction of grad_weight. Both count as expected values (`Shape.padding`): the router is not
  known, so a group's size is taken to be any number from 0 to twice the mean, with equal
  probability. Waves are not counted.
- Two launches instead of one: torch's kernels first compute the address of each group.
"""

from __future__ import annotations

from float8.config import Gemm, LinearPlan
from float8.estimate.cast_passes import READ, WRITE
from float8.estimate.devices import BF16, FLOAT8, Device
from float8.estimate.shapes import Shape, Use
from float8.kernels.scaled_mm import BLOCKWISE, product_of

RESULT_BYTES = 2
TILE = 128  # tokens of a group that a grouped GEMM multiplies at a time
TILES = ((128, 256), (256, 128), (128, 128))
MOST_PARTS = 8


def gemm_sizes(shape: Shape, use: Use) -> dict[str, tuple[int, int, int]]:
    """The GEMMs that run: name -> rows, columns, contraction."""
    M, K, N = shape.M, shape.K, shape.N
    sizes = {"output": (M, N, K)}
    if use.training:
        sizes["grad_input"] = (M, K, N)
    if use.training and use.weight_trains:
        sizes["grad_weight"] = (N, K, M)
    return sizes


def kinds_of_plan(plan: LinearPlan | None, use: Use) -> dict[str, str]:
    """GEMM -> its kind, for the GEMMs that run; a plan of None is plain ``nn.Linear``."""
    names = gemm_sizes(Shape(1, 1, 1), use)
    return {name: BF16 if plan is None else _kind_of_gemm(getattr(plan, name)) for name in names}


def _kind_of_gemm(gemm: Gemm) -> str:
    if gemm.a is None or gemm.b is None:
        return BF16
    # Products that no device has figures for are emulated like 1x128 ones: dequantised first.
    kind = product_of(gemm.a.block, gemm.b.block)
    return kind if kind in FLOAT8 else BLOCKWISE


def gemm_bytes(kind: str, rows: int, columns: int, contraction: int) -> int:
    """Bytes that one GEMM of this kind reads and writes, each once."""
    operand_bytes = READ if kind == BF16 else WRITE
    return operand_bytes * (rows + columns) * contraction + RESULT_BYTES * rows * columns


def busy(rows: int, columns: int, processors: int | None) -> float:
    """The part of all processors' time in which results that exist are computed."""
    if processors is None:
        return 1.0
    return max(_busy(rows, columns, *tile, processors) for tile in TILES)


def _busy(rows: int, columns: int, tile_rows: int, tile_columns: int, processors: int) -> float:
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    parts = min(MOST_PARTS, max(1, processors // tiles))
    waves = -(-tiles * parts // processors)
    return rows * columns * parts / (tile_rows * tile_columns * processors * waves)


def unoverlapped_bytes(results: int, processors: int | None) -> int:
    """The bytes of so many results whose writing waits for the last product."""
    return 0 if processors is None else RESULT_BYTES * results


def gemm_seconds(device: Device, kind: str, rows: int, columns: int, contraction: int) -> float:
    """Time of one GEMM of this kind (`BF16` or one of `FLOAT8`)."""
    processors, elements = device.tiled_processors, (rows + columns) * contraction
    flops = 2 * rows * columns * contraction / busy(rows, columns, processors)
    writing = unoverlapped_bytes(rows * columns, processors) / device.bytes_per_second
    computing = device.products[kind].seconds(flops, elements) + writing
    moving = gemm_bytes(kind, rows, columns, contraction) / device.bytes_per_second
    return max(computing, moving) + device.launch.value


def grouped_gemm_bytes(kind: str, name: str, shape: Shape) -> int:
    """Bytes that the grouped GEMM of this name reads and writes, each once, without padding."""
    read, written = _grouped_elements(name, shape)
    return (READ if kind == BF16 else WRITE) * read + RESULT_BYTES * written


def _grouped_elements(name: str, shape: Shape) -> tuple[int, int]:
    """Elements of both operands, and of the result."""
    x, w, g = shape.M * shape.K, shape.weights * shape.K * shape.N, shape.M * shape.N
    result = {"output": g, "grad_input": x, "grad_weight": w}[name]
    return x + w + g - result, result


def grouped_gemm_seconds(device: Device, kind: str, name: str, shape: Shape) -> float:
    """Time of the grouped GEMM ``output``, ``grad_input`` or ``grad_weight`` of a shape with E."""
    tokens = shape.M + (0 if device.emulates else shape.padding(TILE))
    flops, (elements, results) = 2 * tokens * shape.K * shape.N, _grouped_elements(name, shape)
    writing = unoverlapped_bytes(results, device.tiled_processors) / device.bytes_per_second
    computing = device.products[kind].seconds(flops, elements) + writing
    moving = grouped_gemm_bytes(kind, name, shape) / device.bytes_per_second
    return max(computing, moving) + (1 if device.emulates else 2) * device.launch.value
