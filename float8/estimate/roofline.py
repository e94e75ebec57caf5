"""The time of a layer: three GEMMs and the casts of their operands.

A cast is a few passes over memory, each ``bytes / rate + launch``. A plain layer is three bfloat16
GEMMs without casts. The clock under load is part of the rates that a GEMM is said to reach. Not
modelled: the host (eager mode waits for Python on small layers), caches, and communication; biases,
whose gradient takes 1/16 byte per element of grad_output and two launches where the cast adds its
columns, and another read in bfloat16; amaxes of weights that an optimizer has recorded.

Float8 copies of an expert's operands for grad_weight are padded to multiples of 16 tokens per group
(128 for mx). Grouped GEMMs reach a part of the rate of dense ones (`GROUPED`). torchao's, on a B200
(torchao/prototype/moe_training/README.md), take 0.9 to 1.25 times as long as predicted.

**GEMMs.** For M tokens, K ``in_features``, N ``out_features``::

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
nothing.

A grouped GEMM multiplies each group of tokens by its expert's weight. It is priced as a GEMM with
these differences, for T tokens in E groups:

- Weights, and their gradients, have E matrices; every operand is read once.
- Each group's tokens fill whole tiles of 128, along the rows of output and grad_input and along the
  contraction of grad_weight. Both count as expected values (`Shape.padding`): the router is not
  known, so a group's size is taken to be any number from 0 to twice the mean, with equal
  probability. Waves are not counted.
- Two launches instead of one: torch's kernels first compute the address of each group.

**Casts.** Each operand enters two GEMMs, once row-major and once transposed, because tensor cores
read the contraction last. The kernels of this library move, in bytes per bfloat16 element:

==================================== ========== ========== ======================================
cast                                 row-major  transposed both orientations together
==================================== ========== ========== ======================================
dynamic tensorwise                   2 + 3 = 5  2 + 3 = 5  2 + 4 = 6
delayed or static tensorwise         3          3          4
dynamic rowwise                      3          2 + 3 = 5  2 + 4 = 6
dynamic 1x128, 128x128, mx           3          3          4
==================================== ========== ========== ======================================

3 is 2 read and 1 written; 4 is 2 read and 1 written in each orientation. A leading 2 is a separate
pass that computes amaxes: the scale of a tensor, or of a column, depends on elements that no single
thread block reads. A delayed cast records its amax on the way. Forward casts the weight row-major,
backward transposed; if both casts are equal, backward reuses forward's scale (3 bytes). With cached
weights the microbatches of a step share both casts.

Every pass is one launch. Column amaxes are accumulated atomically into zeros that another launch
writes: a rowwise cast in both orientations is three launches. A float32 weight is assumed to run
under autocast to bfloat16; each cast of it first converts it, 6 bytes per element. Scales count in
blocks along one dimension, as 1/32 byte per element and orientation: 4 bytes per 128 elements, or
one byte (E8M0) per 32. Other scales, reads of scales by GEMMs, and launches that fill or repeat a
scale are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from float8.config import LinearPlan, OperandCast, ScalingType
from float8.config.plan import GEMM_NAMES
from float8.estimate.devices import BF16, FLOAT8, Device, MemoryPass
from float8.granularity import WHOLE, Block, scale_shape
from float8.kernels.cublas import ALIGNMENT
from float8.kernels.grouped_mm import TORCH_MX
from float8.kernels.groups import padded_tokens
from float8.kernels.scaled_mm import BLOCKWISE, MX, ROWWISE, TENSORWISE, product_of

# --- a layer's sizes, and how it is used


LARGEST = 2**30  # of any size or count: beyond, sums of bytes exceed 64 bits


def check_count(value: object, what: str) -> int:
    """The value, or a ValueError unless it is an integer from 1 to `LARGEST`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ValueError(f"{what}={value!r} must be an integer >= 1 and <= {LARGEST}")
    return value


@dataclass(frozen=True)
class Shape:
    """A layer and its batch: M tokens, K in_features, N out_features; of E experts, where given.

    With E, the M tokens are rows of the grouped GEMM: a token that two experts read counts twice.
    """

    M: int
    K: int
    N: int
    E: int | None = None

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None:
                check_count(size, f"a shape is M,K,N or M,K,N,E: {name}")

    @property
    def elements(self) -> dict[str, int]:
        """Those of input, weight and grad_output, by the GEMM whose result has as many."""
        M, K, N = self.M, self.K, self.N
        return {"grad_input": M * K, "grad_weight": (self.E or 1) * N * K, "output": M * N}

    def __str__(self) -> str:
        return ",".join(str(size) for size in vars(self).values() if size is not None)

    def padding(self, multiple: int) -> float:
        """The expected tokens that fill all groups up to multiples of ``multiple``.

        A group's size is uniform over 0 .. q, where q is twice the mean, rounded. Its ceiling to
        multiples of A is then, with n = q // A, on average ::

            A * (A * n * (n + 1) / 2 + (q - n * A) * (n + 1)) / (q + 1)
        """
        groups = self.E or 1
        q = max(1, round(2 * self.M / groups))
        n, rest = divmod(q, multiple)
        filled = multiple * (multiple * n * (n + 1) / 2 + rest * (n + 1)) / (q + 1)
        return groups * (filled - q / 2)


@dataclass(frozen=True)
class Use:
    """How a layer is used.

    Args:
        training: forward and backward; False is forward alone.
        weight_trains: the weight gradient is computed.
        weights_cached: the weight is cast once per step, in both orientations, instead of in every
            forward and every backward; the casts stay in memory, 2 bytes per element. Under
            ``dequantize_in_backward`` there is one, which every backward dequantises.
        gradient_accumulation: microbatches per step, which share a cached cast.
        converts_weight: the weight is float32 and is rounded to bfloat16 before it is cast.

    Raises:
        ValueError: gradient_accumulation is not an integer from 1 to `LARGEST`.
    """

    training: bool = True
    weight_trains: bool = True
    weights_cached: bool = False
    gradient_accumulation: int = 1
    converts_weight: bool = False

    def __post_init__(self) -> None:
        check_count(self.gradient_accumulation, "gradient_accumulation")

    @property
    def gemms(self) -> tuple[str, ...]:
        """The GEMMs that run."""
        names = "output", "grad_input", "grad_weight"
        return names[: 1 + self.training + (self.training and self.weight_trains)]

    def caches_weight(self, plan: LinearPlan) -> bool:
        """Whether the weight is cached: only if both of its GEMMs read it in float8."""
        both = plan.output.b is not None and (plan.grad_input.b is not None or plan.dequantizes)
        return self.weights_cached and both


# --- casts: the passes over memory, and their bytes


READ = 2  # bytes of a bfloat16 element
WRITE = 1  # bytes of a float8 element
CONVERT = MemoryPass("convert", 4 + 2)  # float32, rounded to bfloat16
FILL = MemoryPass("fill", 0)  # a launch that writes a few zeros
DEQUANTIZE = MemoryPass("dequantize", WRITE + READ)
GIVEN = "given"  # the scale is known before the cast: delayed and static
TRANSPOSED = " transposed"
MX_BLOCKS = "1x32"
_KINDS: dict[Block, str] = {
    (WHOLE, WHOLE): TENSORWISE,
    (1, WHOLE): ROWWISE,
    (128, 128): "128x128",
    (32, 32): "128x128",  # as few scales, and the same passes
    (1, 32): MX_BLOCKS,
}
_SCALES = {"1x128": 1 / 32, MX_BLOCKS: 1 / 32}  # bytes of scales per element


def passes_of_layer(plan: LinearPlan, use: Use) -> tuple[list[MemoryPass], ...]:
    """The passes over input, weight and grad_output of one layer for one batch of tokens.

    Those over a weight that is cached are made once per step, except those of backward
    (`cast_seconds`).
    """
    trains = "grad_weight" in use.gemms
    second_x, second_g = (plan.grad_weight.b, plan.grad_weight.a) if trains else (None, None)
    x = _casts(plan.output.a, second_x) + [DEQUANTIZE] * (plan.dequantizes and trains)
    g = _casts(plan.grad_input.a, second_g) if use.training else []
    convert = [CONVERT] if use.converts_weight else []
    if use.caches_weight(plan):
        return x, convert + _casts(plan.output.b, plan.grad_input.b), g
    w = convert + _passes(plan.output.b)
    if plan.dequantizes and use.training:  # the weight is cast again, with forward's scale
        w += [*convert, _passes(plan.output.b)[-1], DEQUANTIZE]
    elif use.training:
        backward = _passes(plan.grad_input.b, 1, TRANSPOSED)
        w += convert + (backward[-1:] if plan.w.is_shared else backward)  # with forward's scale
    return x, w, g


def _casts(first: OperandCast | None, second: OperandCast | None) -> list[MemoryPass]:
    """The passes of one call: the row-major copy by ``first``, the transposed one by ``second``."""
    if first is not None and second is not None and _kind(first) == _kind(second):
        return _passes(first, 2)
    return _passes(first) + _passes(second, 1, TRANSPOSED)


def _passes(cast: OperandCast | None, copies: int = 1, place: str = "") -> list[MemoryPass]:
    """One entry of the table of this file; names are keys of `Device.passes`."""
    if cast is None:
        return []
    kind = _kind(cast)
    amax = MemoryPass(f"amax {kind}{place}", READ)
    copy = MemoryPass(f"cast {kind}{place}", READ + copies * (WRITE + _SCALES.get(kind, 0)))
    if kind == ROWWISE and (copies, place) != (1, ""):
        return [FILL, amax, copy]
    return [amax, copy] if kind == TENSORWISE else [copy]


def _kind(cast: OperandCast) -> str:
    """Blocks without hardware count as 1x128."""
    is_dynamic = cast.scaling_type is ScalingType.DYNAMIC
    return _KINDS.get(cast.block, "1x128") if is_dynamic else GIVEN


# --- GEMMs


RESULT_BYTES = 2
TILE = 128  # tokens of a group that a grouped GEMM multiplies at a time
TILES = ((128, 256), (256, 128), (128, 128))
MOST_PARTS = 8
# The part of a dense GEMM's rate that a grouped one reaches: output, grad_input, grad_weight.
# Measured on an H100, 8 experts of 4,096 tokens (benchmarks/results/h100_2026-11-27/gemms.txt), and
# assumed elsewhere. Gradients sum in float32 every 128 of the contraction, by Triton's kernel or,
# rowwise, by torch's. MX and Blackwell's bfloat16: medians of torchao's table for a B200
# (torchao/prototype/moe_training/README.md).
GROUPED = {
    BF16: (0.80, 0.80, 0.80),
    MX: (0.45, 0.45, 0.45),
    TENSORWISE: (0.93, 0.53, 0.43),
    ROWWISE: (0.94, 0.70, 0.69),
    BLOCKWISE: (0.70, 0.70, 0.43),
}


def kinds_of_plan(plan: LinearPlan | None, use: Use) -> dict[str, str]:
    """GEMM -> its kind, for the GEMMs that run; a plan of None is plain ``nn.Linear``."""
    kinds = dict.fromkeys(use.gemms, BF16)
    for name in kinds if plan is not None else ():
        gemm = getattr(plan, name)
        if gemm.a is not None and gemm.b is not None:
            kind = product_of(gemm.a.block, gemm.b.block)
            # Others are emulated like 1x128 ones: dequantised first.
            kinds[name] = kind if kind in FLOAT8 else BLOCKWISE
    return kinds


def gemm_sizes(shape: Shape) -> dict[str, tuple[int, int, int]]:
    """Each GEMM's rows, columns and contraction."""
    M, K, N = shape.M, shape.K, shape.N
    return {"output": (M, N, K), "grad_input": (M, K, N), "grad_weight": (N, K, M)}


def gemm_bytes(kind: str, shape: Shape, name: str = "output") -> int:
    """Bytes that one GEMM of this kind reads and writes, each once, without padding."""
    written = shape.elements[name]
    read = sum(shape.elements.values()) - written
    return (READ if kind == BF16 else WRITE) * read + RESULT_BYTES * written


def busy(rows: int, columns: int, processors: float) -> float:
    """The part of all processors' time in which results that exist are computed."""
    parts = []
    for tile_rows, tile_columns in TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        split = min(MOST_PARTS, max(1, processors // tiles))
        waves = -(-tiles * split // processors)
        parts.append(rows * columns * split / (tile_rows * tile_columns * processors * waves))
    return max(parts)


def gemm_seconds(device: Device, kind: str, shape: Shape, name: str = "output") -> float:
    """Time of one GEMM of this kind (`BF16` or one of `FLOAT8`), grouped where the shape has E."""
    rows, columns, _ = gemm_sizes(shape)[name]
    if shape.E is None:
        launches, part = 1, busy(rows, columns, device.processors.value)
    else:
        launches, part = 2, shape.M / (shape.M + shape.padding(TILE))
        is_blackwell = kind == BF16 and device.arch.startswith("sm_10")
        part *= dict(zip(GEMM_NAMES, GROUPED[MX if is_blackwell else kind], strict=True))[name]
    computing = device.products[kind].seconds(2 * shape.M * shape.K * shape.N / part)
    writing = RESULT_BYTES * shape.elements[name] / device.bytes_per_second
    moving = gemm_bytes(kind, shape, name) / device.bytes_per_second
    return max(computing + writing, moving) + launches * device.launch.value


# --- layers


class Seconds(NamedTuple):
    """The time of a layer for one batch: its GEMMs, and its casts."""

    gemms: float
    casts: float = 0.0

    @property
    def total(self) -> float:
        """The time of GEMMs and casts together."""
        return self.gemms + self.casts


def layer_seconds(device: Device, shape: Shape, plan: LinearPlan | None, use: Use) -> Seconds:
    """Time of one layer for one batch; a plan of None is plain ``nn.Linear`` in bfloat16."""
    kinds = kinds_of_plan(plan, use)
    gemms = sum(gemm_seconds(device, kind, shape, name) for name, kind in kinds.items())
    return Seconds(gemms, 0.0 if plan is None else cast_seconds(device, shape, plan, use))


def cast_seconds(device: Device, shape: Shape, plan: LinearPlan, use: Use) -> float:
    """Time of all casts of one layer for one batch."""
    passes = passes_of_layer(plan, use)
    x, w, g = map(device.seconds_of, passes, shape.elements.values())
    seconds = x + w / (use.gradient_accumulation if use.caches_weight(plan) else 1) + g
    if plan.dequantizes and use.caches_weight(plan) and use.training:
        seconds += device.seconds_of([DEQUANTIZE], shape.elements["grad_weight"])
    if shape.E is not None and "grad_weight" in use.gemms:  # the padding of its operands
        for cast, width in (plan.grad_weight.a, shape.N), (plan.grad_weight.b, shape.K):
            if cast is not None:
                padding = WRITE * width * shape.padding(tokens_aligned(cast))
                seconds += padding / device.bytes_per_second
    return seconds


def tokens_aligned(cast: OperandCast) -> int:
    """The tokens to whose multiples a GPU pads each group, where they are the contraction."""
    return TORCH_MX.align if _KINDS.get(cast.block) == MX_BLOCKS else ALIGNMENT


def saved_bytes(shape: Shape, plan: LinearPlan | None, use: Use) -> int:
    """The bytes that one layer saves for backward, and those of its weight's cached casts.

    A plan of None is ``nn.Linear``. Layers that read the same input (query, key and value) share
    ``nn.Linear``'s copy but not the float8 copies: for them the saving is less than the sum over
    layers. Experts reserve the most that padding could take, so that no size depends on the router.
    """
    M, K, N, E, kept = shape.M, shape.K, shape.N, shape.E or 1, 0
    if plan is not None and use.caches_weight(plan):
        kept = (1 if plan.dequantizes else 2) * WRITE * E * N * K
    dequantizes = plan is not None and plan.dequantizes
    keeps_scale = plan is not None and (plan.w.is_shared or dequantizes)
    if plan is not None and keeps_scale and plan.output.b is not None and use.training:
        scales = E * prod(scale_shape((N, K), plan.output.b.block))
        kept += scales * plan.output.b.scale_format.dtype.itemsize
    cast = None if plan is None else plan.output.a if dequantizes else plan.grad_weight.b
    if "grad_weight" not in use.gemms:
        return kept
    if cast is None:
        return kept + READ * M * K
    if dequantizes:  # as forward multiplied it, without padding
        scales = prod(scale_shape((M, K), cast.block))
        return kept + WRITE * M * K + cast.scale_format.dtype.itemsize * scales
    block, tokens, scales = cast.block, M, prod(scale_shape((K, M), cast.block))
    if shape.E is not None:
        tokens = padded_tokens(M, E, tokens_aligned(cast))
        # One; or for each row one per group, or one per block that a group may have.
        per_row = E + (0 if block[-1] == WHOLE else tokens // block[-1])
        scales = 1 if block == (WHOLE, WHOLE) else K * per_row
    return kept + WRITE * tokens * K + cast.scale_format.dtype.itemsize * scales
