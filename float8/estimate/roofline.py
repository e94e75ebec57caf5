"""The time of a layer: three GEMMs and the casts of their operands.

A cast is a few passes over memory, each ``bytes / rate + launch``. A plain layer is three bfloat16
GEMMs without casts. The clock under load is part of the rates that a GEMM is said to reach. Not
modelled: the host (eager mode waits for Python on small layers), caches, and communication; biases,
whose gradient takes 1/16 byte per element of grad_output and two launches where the cast adds its
columns, and another read in bfloat16; DeepGEMM, which ran two of three products of ``blockwise``
experts in 0.61 to 0.86 of Triton's time (docs/compatibility.md).

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
- Each group's tokens fill whole tiles of 128, along the rows of output and grad_input, along the
  contraction of grad_weight, and in the casts of input and grad_output. They count as expected
  values (`Shape.padding`): the router is not known, so a group's size is taken to be any number
  from 0 to twice the mean, with equal probability. Waves are not counted.
- It reaches a part of the dense rate, which was measured with groups of 512 and of 4,096 tokens
  (`float8.estimate.devices.GROUPED`). A group of T / E tokens between costs these, and time that
  does not depend on its size: 1 / part is linear in E / T. Smaller and larger groups have the part
  of the nearer measured size.
- Fast sums (`sums_fast`) have parts of their own.
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
thread block reads. A delayed cast finds its amax on the way, and a launch records it: where it
reads the weight a second time, it records nothing. Forward casts the weight row-major,
backward transposed; if both casts are equal, backward reuses forward's scale (3 bytes), and a
tensorwise cast after a rowwise one the maximum of its scales (3 bytes and a launch). With cached
weights the microbatches of a step share both casts.

Every pass is one launch. Column amaxes are accumulated atomically into zeros that another launch
writes: a rowwise cast in both orientations is three launches. A float32 weight is assumed to run
under autocast to bfloat16; each cast of it first converts it, 6 bytes per element. Scales count in
blocks along one dimension, as 1/32 byte per element and orientation: 4 bytes per 128 elements, or
one byte (E8M0) per 32. Other scales, reads of scales by GEMMs, and launches that fill, repeat or
expand a scale (`float8.kernels.gpu.expand_scales`) are ignored.

On AMD GPUs casts run op by op in plain PyTorch, and move 43 to 94 bytes per element
(`PLAIN_BYTES`); torch.compile fuses them, which is not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from float8.arguments import check_integer
from float8.config import OperandCast, ScalingType
from float8.estimate.devices import BF16, FLOAT8_GEMMS, LARGE, SMALL, Device, MemoryPass
from float8.granularity import WHOLE, Block, scale_shape
from float8.kernels.cublas import ALIGNMENT
from float8.kernels.grouped_products import TORCH_MX
from float8.kernels.groups import SHORT_SUM, padded_tokens
from float8.kernels.products import (
    BLOCKWISE_PRODUCT,
    MX_PRODUCT,
    ROWWISE_PRODUCT,
    TENSORWISE_PRODUCT,
    needs_power_of_two_scales,
    product_name,
)
from float8.linear.plan import LinearPlan

# --- a layer's sizes, and how it is used


GROUP_TILE = 128  # tokens of a group that one program of a grouped GEMM or a cast takes


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
                check_integer(size, f"a shape is M,K,N or M,K,N,E: {name}", 1)

    @property
    def elements(self) -> dict[str, int]:
        """Those of input, weight and grad_output, by the GEMM whose result has as many."""
        M, K, N = self.M, self.K, self.N
        return {"grad_input": M * K, "grad_weight": (self.E or 1) * N * K, "output": M * N}

    def __str__(self) -> str:
        return ",".join(str(size) for size in vars(self).values() if size is not None)

    @property
    def filled(self) -> float:
        """The tokens of all groups, each group's filled up to whole tiles, per token."""
        return 1 if self.E is None else 1 + self.padding(GROUP_TILE) / self.M

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
        cached_microbatches: that share one cast of the weight, in both orientations, instead of in
            every forward and every backward; the casts stay in memory, 2 bytes per element. Under
            ``dequantize_in_backward`` there is one, which every backward dequantises. 0 for none.
        converts_weight: the weight is float32 and is rounded to bfloat16 before it is cast.
        plain_casts: casts run in plain PyTorch, op by op, as on AMD GPUs.

    Raises:
        ValueError: cached_microbatches is less than 0.
    """

    training: bool = True
    weight_trains: bool = True
    cached_microbatches: int = 0
    converts_weight: bool = False
    plain_casts: bool = False

    def __post_init__(self) -> None:
        check_integer(self.cached_microbatches, "cached_microbatches", 0)

    @property
    def gemms(self) -> tuple[str, ...]:
        """The GEMMs that run."""
        names = "output", "grad_input", "grad_weight"
        return names[: 1 + self.training + (self.training and self.weight_trains)]

    def caches_weight(self, plan: LinearPlan) -> bool:
        """Whether the weight is cached: only if both of its GEMMs read it in float8."""
        is_in_float8 = plan.w.first is not None and plan.w.second is not None
        return self.cached_microbatches > 0 and is_in_float8


# --- casts: the passes over memory, and their bytes


READ = 2  # bytes of a bfloat16 element
WRITE = 1  # bytes of a float8 element
CONVERT = MemoryPass("convert", 4 + 2)  # float32, rounded to bfloat16
FILL = MemoryPass("fill", 0)  # a launch that writes a few numbers
DEQUANTIZE = MemoryPass("dequantize", WRITE + READ)
GIVEN = "given"  # the scale is known before the cast: delayed and static
TRANSPOSED = " transposed"
MX_BLOCKS = "1x32"
_KINDS: dict[Block, str] = {
    (WHOLE, WHOLE): TENSORWISE_PRODUCT,
    (1, WHOLE): ROWWISE_PRODUCT,
    (128, 128): "128x128",
    (32, 32): "128x128",  # as few scales, and the same passes
    (1, 32): MX_BLOCKS,
}
# In plain PyTorch: bytes per element of one orientation, and of the other beside it, as the meter
# of the tests counts them: for scales of columns the cast is made again. A launch moves about 3.
PLAIN_BYTES = {TENSORWISE_PRODUCT: (44, 5), GIVEN: (43, 3), ROWWISE_PRODUCT: (47, 47)}
_SCALES = {"1x128": 1 / 32, MX_BLOCKS: 1 / 32}  # bytes of scales per element


def passes_of_layer(plan: LinearPlan, use: Use) -> tuple[list[MemoryPass], ...]:
    """The passes over input, weight and grad_output of one layer for one batch of tokens.

    Those over a weight that is cached are made once per step, except those of backward
    (`cast_seconds`).
    """
    trains = "grad_weight" in use.gemms
    second_x, second_g = (plan.grad_weight.b, plan.grad_weight.a) if trains else (None, None)
    x = _casts(use, plan.output.a, second_x) + [DEQUANTIZE] * (dequantizes(plan) and trains)
    g = _casts(use, plan.grad_input.a, second_g) if use.training else []
    convert = [CONVERT] if use.converts_weight else []
    if use.caches_weight(plan):
        return x, convert + _casts(use, plan.output.b, plan.grad_input.b), g
    w = convert + passes_of_cast(use, plan.output.b)
    if dequantizes(plan) and use.training:  # the weight is cast again, with forward's scale
        w += [*convert, passes_of_cast(use, plan.output.b)[-1], DEQUANTIZE]
    elif use.training:
        backward = passes_of_cast(use, plan.grad_input.b, 1, TRANSPOSED)
        if plan.w.shares_data:
            backward = backward[-1:]  # with forward's scale
        w += convert + backward
    return x, w, g


def dequantizes(plan: LinearPlan) -> bool:
    """Whether backward multiplies what forward multiplied, dequantised."""
    return plan.output.b is not None and plan.grad_input.b is None and plan.w.second is not None


def _casts(use: Use, first: OperandCast | None, second: OperandCast | None) -> list[MemoryPass]:
    """The passes of one call: the row-major copy by ``first``, the transposed one by ``second``."""
    if first is not None and second is not None and _kind(first) == _kind(second):
        return passes_of_cast(use, first, 2)
    return passes_of_cast(use, first) + passes_of_cast(use, second, 1, TRANSPOSED)


def passes_of_cast(
    use: Use, cast: OperandCast | None, copies: int = 1, place: str = ""
) -> list[MemoryPass]:
    """One entry of the table of this file; names are keys of `Device.passes`."""
    if cast is None:
        return []
    kind = _kind(cast)
    record = [FILL] * (cast.scaling_type is ScalingType.DELAYED)  # the maximum of recorded amaxes
    if use.plain_casts:
        first, other = PLAIN_BYTES.get(kind, PLAIN_BYTES[ROWWISE_PRODUCT])
        moved = first + (copies - 1) * other
        return record + [FILL] * (moved // 3 - 1) + [MemoryPass("plain", moved)]
    amax = MemoryPass(f"amax {kind}{place}", READ)
    copy = MemoryPass(f"cast {kind}{place}", READ + copies * (WRITE + _SCALES.get(kind, 0)))
    if kind == ROWWISE_PRODUCT and (copies, place) != (1, ""):
        return [FILL, amax, copy]
    return [amax, copy] if kind == TENSORWISE_PRODUCT else [*record, copy]


def _kind(cast: OperandCast) -> str:
    """Blocks without hardware count as 1x128."""
    is_dynamic = cast.scaling_type is ScalingType.DYNAMIC
    return _KINDS.get(cast.block[-2:], "1x128") if is_dynamic else GIVEN


# --- GEMMs


RESULT_BYTES = 2
TILE_SHAPES = ((128, 256), (256, 128), (128, 128))
MOST_PARTS = 8


def kinds_of_plan(plan: LinearPlan | None, use: Use) -> dict[str, str]:
    """GEMM -> its kind, for the GEMMs that run; a plan of None is plain ``nn.Linear``."""
    kinds = dict.fromkeys(use.gemms, BF16)
    for name in kinds if plan is not None else ():
        gemm = getattr(plan, name)
        if gemm.a is not None and gemm.b is not None:
            kind = product_name(gemm.a.block[-2:], gemm.b.block[-2:])
            # Others are emulated like 1x128 ones: dequantised first.
            kinds[name] = kind if kind in FLOAT8_GEMMS else BLOCKWISE_PRODUCT
            if needs_power_of_two_scales(gemm.name):
                kinds[name] = MX_PRODUCT
    return kinds


def sums_fast(asked: bool | None, shape: Shape, name: str) -> bool:
    """Whether a grouped product sums fast, as `GemmConfig.use_fast_accum` asks; None has a rule."""
    terms = shape.M / (shape.E or 1) if name == "grad_weight" else gemm_sizes(shape)[name][2]
    return terms <= SHORT_SUM if asked is None else asked


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
    for tile_rows, tile_columns in TILE_SHAPES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        split = min(MOST_PARTS, max(1, processors // tiles))
        waves = -(-tiles * split // processors)
        parts.append(rows * columns * split / (tile_rows * tile_columns * processors * waves))
    return max(parts)


def gemm_seconds(
    device: Device, kind: str, shape: Shape, name: str = "output", fast: bool = False
) -> float:
    """Time of one GEMM, `BF16` or one of `FLOAT8_GEMMS`; grouped where the shape has E."""
    speed = device.products[kind]
    computing = 2 * shape.M * shape.K * shape.N / speed.rate
    if shape.E is None:
        rows, columns, _ = gemm_sizes(shape)[name]
        launches, computing = 1, computing / busy(rows, columns, device.processors)
    else:
        launches, computing = 2, computing * shape.filled
        parts = device.grouped.get(kind, (1.0,) * 4)
        parts = device.grouped.get(f"{kind} fast", parts) if fast else parts
        small, large = parts[2:] if name == "grad_weight" else parts[:2]
        size = min(max(shape.M / shape.E, SMALL), LARGE)
        share = (LARGE / size - 1) / (LARGE / SMALL - 1)  # of the small groups' time
        computing *= share / small + (1 - share) / large
    writing = RESULT_BYTES * shape.elements[name] / device.bandwidth
    moving = gemm_bytes(kind, shape, name) / device.bandwidth
    return max(computing + speed.ramp_s + writing, moving) + launches * device.launch


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
    gemms = 0.0
    for name, kind in kinds_of_plan(plan, use).items():
        fast = plan is not None and sums_fast(getattr(plan, name).use_fast_accum, shape, name)
        gemms += gemm_seconds(device, kind, shape, name, fast)
    return Seconds(gemms, 0.0 if plan is None else cast_seconds(device, shape, plan, use))


def cast_seconds(device: Device, shape: Shape, plan: LinearPlan, use: Use) -> float:
    """Time of all casts of one layer for one batch."""
    passes = passes_of_layer(plan, use)
    M, K, N, E = shape.M * shape.filled, shape.K, shape.N, shape.E or 1
    x, w, g = map(device.seconds_of, passes, (M * K, E * N * K, M * N))
    seconds = x + w / (use.cached_microbatches if use.caches_weight(plan) else 1) + g
    if dequantizes(plan) and use.caches_weight(plan) and use.training:
        seconds += device.seconds_of([DEQUANTIZE], E * N * K)
    return seconds


def saved_bytes(shape: Shape, plan: LinearPlan | None, use: Use) -> int:
    """The bytes that one layer saves for backward, and those of its weight's cached casts.

    A plan of None is ``nn.Linear``. Layers that read the same input (query, key and value) share
    ``nn.Linear``'s copy but not the float8 copies: for them the saving is less than the sum over
    layers. Experts reserve the most that padding could take, so that no size depends on the router.
    """
    M, K, N, E = shape.M, shape.K, shape.N, shape.E or 1
    cast = None if plan is None else plan.output.a if dequantizes(plan) else plan.grad_weight.b
    trains = "grad_weight" in use.gemms
    kept = READ * M * K if trains and cast is None else 0
    if plan is None:
        return kept
    if use.caches_weight(plan):
        kept += (1 if dequantizes(plan) else 2) * WRITE * E * N * K
    w, keeps_scale = plan.output.b, plan.w.shares_data
    if w is not None and keeps_scale and use.training:
        kept += E * prod(scale_shape((N, K), w.block[-2:])) * w.scale_format.dtype.itemsize
    if cast is None or not trains:
        return kept
    # When dequantised, as forward multiplied it, without padding.
    tokens, block = M, cast.block
    scales = prod(scale_shape((M, K) if dequantizes(plan) else (K, M), block))
    if shape.E is not None and not dequantizes(plan):
        # To whose multiples a GPU pads the tokens of each group: they are the contraction.
        multiple = TORCH_MX.align if _KINDS.get(block[-2:]) == MX_BLOCKS else ALIGNMENT
        tokens = padded_tokens(M, E, multiple)
        # One; or for each row one per group, or one per block that a group may have.
        per_row = E + (0 if block[-1] == WHOLE else tokens // block[-1])
        scales = 1 if block == (WHOLE, WHOLE) else K * per_row
    return kept + WRITE * tokens * K + cast.scale_format.dtype.itemsize * scales
