"""The time of a layer: three GEMMs (`gemms.py`) and the casts of their operands (`cast_passes.py`).

A cast is a few passes over memory, each ``bytes / rate + launch``. A plain layer is three bfloat16
GEMMs without casts. The clock under load is part of the rates that a GEMM is said to reach. Not
modelled: the host (eager mode waits for Python on small layers), caches, and communication; biases,
whose gradient takes 1/16 byte per element of grad_output and two launches where the cast adds its
columns, and another read in bfloat16; amaxes of weights that an optimizer has recorded.

Float8 copies of an expert's operands for grad_weight are padded to multiples of 16 tokens per group
(128 for mx). Grouped GEMMs are assumed to reach the efficiency of dense ones, in bfloat16 and in
float8. Those that torchao measured on a B200 (torchao/prototype/moe_training/README.md) take 1.7
to 2.3 times as long as predicted, in both; mxfp8 speeds them up 1.19 to 1.81 times, predicted are
1.28 to 1.53.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from float8.config import LinearPlan, OperandCast
from float8.estimate.cast_passes import (
    MX_BLOCKS,
    READ,
    WRITE,
    MemoryPass,
    kind_of_block,
    passes_of_layer,
)
from float8.estimate.devices import Device
from float8.estimate.gemms import (
    gemm_seconds,
    gemm_sizes,
    grouped_gemm_seconds,
    kinds_of_plan,
)
from float8.estimate.shapes import Shape, Use
from float8.granularity import WHOLE, Block, scale_shape
from float8.kernels.cublas import ALIGNMENT
from float8.kernels.grouped_mm import TORCH_MX
from float8.kernels.groups import padded_tokens


@dataclass(frozen=True)
class Seconds:
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
    gemms = sum(
        gemm_seconds(device, kinds[name], *sizes)
        if shape.E is None
        else grouped_gemm_seconds(device, kinds[name], name, shape)
        for name, sizes in gemm_sizes(shape, use).items()
    )
    return Seconds(gemms, 0.0 if plan is None else cast_seconds(device, shape, plan, use))


def cast_seconds(device: Device, shape: Shape, plan: LinearPlan, use: Use) -> float:
    """Time of all casts of one layer for one batch."""

    def seconds_of(elements: int, passes: list[MemoryPass]) -> float:
        return sum(device.pass_seconds(p.name, p.bytes_per_element * elements) for p in passes)

    x, w, g, runs_per_batch = passes_of_layer(plan, use, device.emulates, device.compiled_casts)
    M, K, N = shape.M, shape.K, shape.N
    weight = seconds_of(shape.weights * N * K, w) * runs_per_batch
    return (
        seconds_of(M * K, x)
        + weight
        + seconds_of(M * N, g)
        + _padding_seconds(device, shape, plan, use)
    )


def _padding_seconds(device: Device, shape: Shape, plan: LinearPlan, use: Use) -> float:
    """Time of writing the padding of the float8 operands of grad_weight."""
    copies = (plan.grad_weight.a, shape.N), (plan.grad_weight.b, shape.K)
    if shape.E is None or device.emulates or not (use.training and use.weight_trains):
        return 0.0
    return sum(
        WRITE * width * shape.padding(tokens_aligned(cast)) / device.bytes_per_second
        for cast, width in copies
        if cast is not None
    )


def tokens_aligned(cast: OperandCast) -> int:
    """The tokens to whose multiples a GPU pads each group, where they are the contraction."""
    return TORCH_MX.align if kind_of_block(cast.block) == MX_BLOCKS else ALIGNMENT


def saved_bytes(shape: Shape, plan: LinearPlan | None, use: Use, emulates: bool = False) -> int:
    """The bytes that one layer saves for backward, and those of its weight's cached casts.

    A plan of None is ``nn.Linear``. Layers that read the same input (query, key and value) share
    ``nn.Linear``'s copy but not the float8 copies: for them the saving is less than the sum over
    layers. Experts reserve the most that padding could take, so that no size depends on the router.
    """
    cached = plan is not None and use.caches_weight(plan)
    kept = 2 * WRITE * shape.weights * shape.N * shape.K if cached else 0
    if not use.training:
        return kept
    elements = shape.M * shape.K if use.weight_trains else 0
    if plan is None:
        return READ * elements
    if plan.reuses_weight and plan.output.b is not None:
        scales = prod(scale_shape((shape.N, shape.K), plan.output.b.block))
        kept += shape.weights * _scale_bytes(plan.output.b) * scales
    if elements and (cast := plan.grad_weight.b) is not None:
        tokens, scales = shape.M, prod(scale_shape((shape.K, shape.M), cast.block))
        if shape.E is not None:
            tokens = padded_tokens(shape.M, shape.E, 1 if emulates else tokens_aligned(cast))
            scales = _scales_of_groups(shape, tokens, cast.block)
        return kept + WRITE * tokens * shape.K + _scale_bytes(cast) * scales
    return kept + READ * elements


def _scale_bytes(cast: OperandCast) -> int:
    return cast.scale_format.dtype.itemsize


def _scales_of_groups(shape: Shape, tokens: int, block: Block) -> int:
    """One; or for each row one per group, or one per block that a group may have."""
    if block == (WHOLE, WHOLE):
        return 1
    return shape.K * (shape.weights + (0 if block[-1] == WHOLE else tokens // block[-1]))
