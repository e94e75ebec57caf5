"""The roofline of one linear layer: three GEMMs, and the casts that feed them.

For M tokens, K ``in_features``, N ``out_features``::

    GEMM          a @ b.T          rows  columns  contraction
    output        x_MK @ w_NK.T    M     N        K
    grad_input    g_MN @ w_KN.T    M     K        N
    grad_weight   g_NM @ x_KM.T    N     K        M

    flops   = 2 * rows * columns * contraction
    bytes   = operand * (rows + columns) * contraction + 2 * rows * columns
    seconds = max(flops / (peak * efficiency(flops)), bytes / bandwidth) + launch

with 2 bytes per operand element in bfloat16 and 1 in float8; results are bfloat16. A cast is a few
passes over memory (`float8.estimate.casts`), each ``bytes / bandwidth + launch``.

    speed-up = sum of the bf16 GEMMs / (sum of the layer's GEMMs + its casts)

A layer without float8 is the same sum with three bf16 GEMMs and no casts. What backward keeps of
the input is 2 bytes per element in bfloat16; 1 byte and the scales in float8. A cached weight
holds 2 bytes per element beside that, 1 in each orientation.

Left out: the host (eager mode on small layers waits for Python, `torch.compile` and CUDA graphs do
not), the caches, the quantisation of tiles and waves, the clock under load, and communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from float8.config import Gemm, LinearPlan
from float8.estimate.casts import LARGEST, WRITE, Pass, Use, is_count, passes_of_layer
from float8.estimate.devices import BF16, FLOAT8, Device
from float8.granularity import scale_shape
from float8.kernels.scaled_mm import BLOCKWISE, product_of

RESULT_BYTES = 2
SCALE_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """A layer and its batch: M tokens, K in_features, N out_features."""

    M: int
    K: int
    N: int

    def __post_init__(self) -> None:
        sizes = (self.M, self.K, self.N)
        if not all(is_count(size) for size in sizes):
            raise ValueError(
                f"a shape is M,K,N (tokens, in, out), integers >= 1 and <= {LARGEST}; got {sizes}"
            )

    def __str__(self) -> str:
        return f"{self.M},{self.K},{self.N}"


@dataclass(frozen=True)
class Seconds:
    """What a layer takes for one batch: in its GEMMs, and in its casts."""

    gemms: float
    casts: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.gemms + self.casts


def gemm_sizes(shape: Shape, use: Use) -> dict[str, tuple[int, int, int]]:
    """The GEMMs that run: name -> rows, columns, contraction."""
    M, K, N = shape.M, shape.K, shape.N
    sizes = {"output": (M, N, K)}
    if use.training:
        sizes["grad_input"] = (M, K, N)
    if use.training and use.weight_trains:
        sizes["grad_weight"] = (N, K, M)
    return sizes


def gemm_bytes(kind: str, rows: int, columns: int, contraction: int) -> int:
    """Bytes that one product of this kind reads and writes, each once."""
    operand_bytes = 2 if kind == BF16 else 1
    return operand_bytes * (rows + columns) * contraction + RESULT_BYTES * rows * columns


def gemm_seconds(device: Device, kind: str, rows: int, columns: int, contraction: int) -> float:
    """Time of one product of this kind (`BF16` or one of `FLOAT8`)."""
    elements = (rows + columns) * contraction
    multiplying = device.products[kind].seconds(2 * rows * columns * contraction, elements)
    moving = gemm_bytes(kind, rows, columns, contraction) / device.bytes_per_second
    return max(multiplying, moving) + device.launch.value


def kind_of_gemm(gemm: Gemm) -> str:
    """Which of a device's products a GEMM of a plan is."""
    if gemm.a is None or gemm.b is None:
        return BF16
    # Products that no device has figures for are emulated like 1x128 ones: dequantised first.
    kind = product_of(gemm.a.block, gemm.b.block)
    return kind if kind in FLOAT8 else BLOCKWISE


def kinds_of_plan(plan: LinearPlan | None, use: Use) -> dict[str, str]:
    """GEMM -> kind of product, for the GEMMs that run; a plan of None is plain ``nn.Linear``."""
    names = gemm_sizes(Shape(1, 1, 1), use)
    return {name: BF16 if plan is None else kind_of_gemm(getattr(plan, name)) for name in names}


def layer_seconds(device: Device, shape: Shape, plan: LinearPlan | None, use: Use) -> Seconds:
    """Time of one layer for one batch; a plan of None is plain ``nn.Linear`` in bfloat16."""
    kinds = kinds_of_plan(plan, use)
    gemms = sum(
        gemm_seconds(device, kinds[name], *sizes) for name, sizes in gemm_sizes(shape, use).items()
    )
    return Seconds(gemms, 0.0 if plan is None else cast_seconds(device, shape, plan, use))


def cast_seconds(device: Device, shape: Shape, plan: LinearPlan, use: Use) -> float:
    """Time of all casts of one layer for one batch."""

    def over(elements: int, passes: list[Pass]) -> float:
        return sum(device.pass_seconds(p.name, p.bytes_per_element * elements) for p in passes)

    x, w, g, weight_times = passes_of_layer(plan, use, device.emulates)
    M, K, N = shape.M, shape.K, shape.N
    return over(M * K, x) + over(N * K, w) * weight_times + over(M * N, g)


def saved_bytes(shape: Shape, plan: LinearPlan | None, use: Use) -> int:
    """What one layer keeps, parameters excluded; a plan of None is ``nn.Linear``.

    That is what backward keeps, and the casts of a cached weight, which outlive it.

    Layers that read one and the same input (query, key and value) share ``nn.Linear``'s copy but
    not the float8 ones; for those the saving is less than the sum over layers says.
    """
    cached = plan is not None and use.caches_weight(plan)
    kept = 2 * WRITE * shape.N * shape.K if cached else 0
    if not use.training:
        return kept
    elements = shape.M * shape.K if use.weight_trains else 0
    if plan is None:
        return 2 * elements
    if plan.reuses_weight and plan.output.b is not None:
        kept += SCALE_BYTES * prod(scale_shape((shape.N, shape.K), plan.output.b.block))
    if elements and plan.grad_weight.b is not None:
        scales = prod(scale_shape((shape.K, shape.M), plan.grad_weight.b.block))
        return kept + elements + SCALE_BYTES * scales
    return kept + 2 * elements
