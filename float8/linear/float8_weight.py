"""Weights that are in float8 before the call: one type for all of them, `Float8Weight`.

`float8_weight` obtains it. A weight may be in float8 for three reasons:

- *cached*: `float8.cached_weights` cast it when it changed (`cast_weight`);
- *gathered*: FSDP2 gathered its shards in float8 (`float8.distributed.gathered_weights`);
- *resident*: the layer's ``.weight`` is a `Float8Tensor` Parameter, described below.

**Resident weights.** There is no high-precision copy: a resident weight stores one byte per element
and the scales. A frozen one serves as the base of adapters, or in a model that is only evaluated
(`float8.convert.inference`). A trainable one is MS-AMP's level O3 (`float8.ms_amp`).

Two GEMMs read the weight w_NK = data_NK * scale. The output contracts K and reads data and scale
unchanged. grad_input contracts N and reads the same data, which is not rounded a second time but
in the last row:

=============== ===================== ==========================================================
block of w_NK   scale                 grad_input_MK = g_MN @ w_NK
=============== ===================== ==========================================================
whole tensor    (1, 1)                the data's transpose, the same scale
128x128         (N / 128, K / 128)    the data's transpose, the scale's transpose
32x32, E8M0     (N / 32, K / 32)      the data's transpose, the scale's transpose
row (1, K)      (N, 1), along the     (g_MN * scale_N), cast along its rows, times the data's
                contraction           transpose with a scale of 1
1x32, E8M0      (N, K / 32)           the dequantised weight is cast along N: exact except
                                      for values far below the largest of the new block
=============== ===================== ==========================================================

On a CPU the transpose is a view. On a GPU, GEMMs read row-major operands only, so the transpose is
a copy that lives while the GEMM runs: one byte per element of one layer.

The weights of experts (E, N, K) are read in the same way, with such scales for each expert; each
token's gradient is multiplied by the scales of its own expert.

The data of a resident weight does not depend on the compute dtype, nor on autocast.
``weight.dtype`` is the dtype that the weight dequantises to and that its gradient has. The gradient
is an ordinary tensor.

What a checkpoint has of a resident weight: `float8.linear.resident_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import Float8LinearConfig, LinearPlan, ScalingType
from float8.granularity import WHOLE, Block, block_name, scale_shape
from float8.kernels import Float8Matrix, mxfp4
from float8.linear.registration import weights_of
from float8.linear.scaling import (
    DelayedState,
    bind_and_cast,
    cast_matrix,
    cast_operand,
    record,
)
from float8.tensor import Float8Tensor

_KEEPS_FACTORS_OUT = (
    "and smooth_input=True multiplies the factors of each call into a weight in high precision; "
    "convert this layer with replace(config, smooth_input=False), or keep its weight in high "
    "precision"
)
TENSORWISE = (WHOLE, WHOLE)
ROWWISE = (1, WHOLE)


# How backward reads what it has of a weight: (saved, call, g_MN, offs) -> w_KN for grad_input, and
# grad_output as it is to be cast. ``saved`` is what forward saved, data or a matrix in high
# precision, and a scale or None; ``offs`` the ends of groups of tokens, or None.
Saved = tuple[Tensor, Any]
Read = tuple[Any, Tensor]
Reads = Callable[[Saved, Any, Tensor, Any], Read]


def cast_again(saved: Saved, call: Any, g_MN: Tensor, offs: Any) -> Read:
    """Of w_NK in high precision, and forward's scale of it if both casts share one: cast it."""
    (w_NK, scale), plan, operand = saved, call.plan, call.plan.w
    if w_NK.dtype != plan.dtype or plan.mxfp4_weights:
        w_NK = rounded(w_NK, plan)
    # A shared cast was recorded in forward. A delayed second cast that differs from the first is
    # refused by the config, so any other is the only cast of the weight.
    records, state = call.record and not operand.is_shared, call.states[1]
    if scale is not None and scale.dim() > 1 and scale.numel() > 1:
        scale = scale.mT
    _, w8_KN, amax = cast_operand(w_NK, operand, state, records, False, True, scale)
    if amax is not None:
        record(state, amax)
    return w8_KN, g_MN


def as_it_is(saved: Saved, call: Any, g_MN: Tensor, offs: Any) -> Read:
    """Of data and scale of w_KN: unchanged."""
    return Float8Matrix(*saved, call.plan.w.second.block), g_MN


def by_scaled_gradient(saved: Saved, call: Any, g_MN: Tensor, offs: Any) -> Read:
    """Of the data of w_KN, and scales (1, N) along the contraction: they multiply grad_output.

    Those of experts are (E, 1, N). Such a weight gets no gradient (`refuses_training`), for which
    grad_output would be another.
    """
    (w_KN, scale), block = saved, call.plan.w.second.block
    ones = scale.new_ones(scale_shape(w_KN.shape, block))
    if offs is not None:  # tokens of no group get the scales of the last expert, and are not read
        tokens = torch.arange(g_MN.shape[0], dtype=offs.dtype, device=offs.device)
        scale = scale[torch.searchsorted(offs[:-1], tokens, right=True), 0]
    return Float8Matrix(w_KN, ones, block), g_MN * scale


def dequantized(saved: Saved, call: Any, g_MN: Tensor, offs: Any) -> Read:
    """Of data and scale of w_NK: dequantised, and cast again where grad_input casts it."""
    plan = call.plan
    w_NK = kernels.dequantize(*saved, plan.w.first.block, plan.dtype)
    return cast_again((w_NK, None), call, g_MN, offs)


def cast_and_dequantized(saved: Saved, call: Any, g_MN: Tensor, offs: Any) -> Read:
    """Of w_NK in high precision, and forward's scale of it: what forward multiplied."""
    w_NK, scale = saved
    found = cast_matrix(rounded(w_NK, call.plan), call.plan.w.first, call.states[1], scale)
    w8_NK: Any = found.row_major
    return dequantized(w8_NK[:2], call, g_MN, offs)


@dataclass(eq=False, slots=True)
class Float8Weight:
    """A weight in float8, for both GEMMs that read it.

    Args:
        row_major: w_NK, for the output.
        transposed: for grad_input: w_KN, or what ``reads`` makes w_KN of.
        reads: how backward reads the data and scale of ``transposed``.
        dtype: the dtype to which the weight was rounded before its cast; None if the data does not
            depend on it.
        amax: for a delayed cast, the amax that each forward records.
        source: the high-precision weight that was cast, or None.

    Attributes:
        version: the version counter of ``source`` at its cast.
    """

    row_major: Float8Matrix
    transposed: Float8Matrix
    reads: Reads = as_it_is
    dtype: torch.dtype | None = None
    amax: Tensor | None = None
    source: Tensor | None = None
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = 0 if self.source is None else version_of(self.source)

    def is_of(self, weight: Tensor) -> bool:
        """Whether the source is this weight and its version counter is unchanged."""
        return weight is self.source and version_of(weight) == self.version

    def tensors(self) -> list[Tensor]:
        """All tensors that it stores."""
        stored = (*self.row_major[:2], *self.transposed[:2], self.amax)
        return [x for x in stored if x is not None]


def rounded(w_NK: Tensor, plan: LinearPlan) -> Tensor:
    """A weight as it is cast: in the compute dtype, and rounded to MXFP4 if the plan says so.

    A smooth weight, which may be in float32, is returned as it is.
    """
    if not plan.smooth_input and w_NK.dtype != plan.dtype:
        w_NK = w_NK.to(plan.dtype)
    return mxfp4.project(w_NK) if plan.mxfp4_weights else w_NK


def version_of(x: Tensor) -> int:
    """The version counter of x, which writes through ``.data`` skip; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version


def float8_weight(layer: Any, plan: LinearPlan) -> Float8Weight | None:
    """The weight of a layer in float8, if it is in float8 before this call; else None.

    ``layer`` is a `Float8Linear`. Its ``cached_weight`` is used only if the weight has not changed.
    Raises ValueError if the weight was cast for another compute dtype than that of ``plan``, or
    requires a gradient that its scales do not allow.
    """
    weight, cached = layer.weight, layer.cached_weight
    if isinstance(weight, Float8Tensor):
        if (reason := refuses_training(weight) or _refuses_plan(weight, plan)) is not None:
            raise ValueError(f"{layer._name}: {reason}")
        return _of_float8_tensor(weight, plan)
    if cached is None or not (torch.compiler.is_compiling() or cached.is_of(weight)):
        return None  # not cached; or the weight was written to or replaced since
    if cached.dtype != plan.dtype:
        raise ValueError(
            f"{layer._name}: the weight was cached in {cached.dtype} and is used in {plan.dtype}: "
            f"write `with cached_weights(model, dtype={plan.dtype})`"
        )
    return cached


def _refuses_plan(weight: Float8Tensor, plan: LinearPlan) -> str | None:
    """The reason why this weight does not fit a plan, or None."""
    if plan.smooth_input:
        return f"its weight is a Float8Tensor, {_KEEPS_FACTORS_OUT}"
    if plan.w.first is None or (plan.w.second is None and not plan.dequantizes):
        return (
            "its weight is a Float8Tensor, and this config multiplies weights in high precision; "
            "give the layer weight.dequantize(), or a config that casts weights"
        )
    if is_resident(weight) or weight.dtype == plan.dtype:
        return None
    return (
        f"its weight was gathered for {weight.dtype} and is used in {plan.dtype}; give fully_shard "
        f"the dtype, as MixedPrecisionPolicy(param_dtype={plan.dtype}), in place of autocast"
    )


def _of_float8_tensor(weight: Float8Tensor, plan: LinearPlan) -> Float8Weight:
    """A resident or gathered weight, or a stack, in both orientations; nothing is copied."""
    w_NK, second = Float8Matrix(weight.float8_data, weight.scale, weight.block), plan.w.second
    if second is None or (weight.scale.dtype != torch.float32 and not plan.w.is_shared):
        return Float8Weight(w_NK, w_NK, dequantized)
    scale_t, block = weight.scale.mT, weight.block[-2:]
    if block == TENSORWISE and not second.is_whole:
        scale_t = weight.scale.expand(scale_shape(w_NK.data.mT.shape, second.block))
    reads = by_scaled_gradient if block == ROWWISE else as_it_is
    return Float8Weight(w_NK, w_NK.t()._replace(scale=scale_t), reads)


def of_experts(weight: Float8Tensor, plan: LinearPlan) -> Float8Weight:
    """The weights of experts (E, N, K) that are in float8, in both orientations; nothing is copied.

    Raises ValueError if the output's GEMM does not read them as they are, or if they require a
    gradient that their scales do not allow.
    """
    first, reason = plan.w.first, _refuses_plan(weight, plan)
    if reason is None and weight.requires_grad and not plan.w.is_shared:
        reason = f"experts get no gradient by scales of {weight.block}: freeze them"
    dtype = weight.float8_data.dtype
    # dynamo of torch 2.11 fails at the != of two blocks
    fits = first is not None and weight.block == first.block and dtype == first.dtype
    if reason is None and not fits:
        reason = f"experts are {dtype} by blocks {weight.block}, not {first}: pass dequantize()"
    if reason is not None:
        raise ValueError(reason)
    return _of_float8_tensor(weight, plan)


def cast_weight(
    weight: Tensor, plan: LinearPlan, state: DelayedState | None
) -> Float8Weight | None:
    """A high-precision weight (N, K), rounded to the compute dtype and cast for both GEMMs.

    The amax is not recorded in ``state``, that of a delayed cast: each forward records it. Returns
    None if a GEMM that reads the weight runs in high precision.
    """
    if plan.w.first is None or (plan.w.second is None and not plan.dequantizes):
        return None
    # A backward cannot save tensors that were made in inference mode.
    with torch.no_grad(), torch.inference_mode(False):
        source = weight.clone() if weight.is_inference() else weight.detach()
        both = not plan.dequantizes
        w_NK, w_KN, amax = cast_operand(
            rounded(source, plan), plan.w, state, state is not None, True, both
        )
        if state is not None:  # a delayed scale is a buffer, and a cache in place writes its own
            w_NK = w_NK._replace(scale=w_NK.scale.clone())
            w_KN = w_KN and w_KN._replace(scale=w_KN.scale.clone())
            amax = None if amax is None else amax.reshape(())
    reads = as_it_is if both else dequantized
    return Float8Weight(w_NK, w_KN if both else w_NK, reads, plan.dtype, amax, weight)


# --- resident weights


def is_resident(weight: Tensor) -> TypeGuard[Float8Tensor]:
    """Whether a weight is resident in float8; one that FSDP2 gathers has another type."""
    return type(weight) is Float8Tensor


def refuses_resident(config: Float8LinearConfig) -> str | None:
    """The reason why weights with this config cannot be resident in float8, or None."""
    if config.smooth_input or config.plan.dequantizes:
        wrong = f"its weight would be in float8, {_KEEPS_FACTORS_OUT}"
        return wrong if config.smooth_input else None
    output, grad_input = config.plan.output.b, config.plan.grad_input.b
    if output is None or grad_input is None:
        name = "output" if output is None else "grad_input"
        return (
            f"its {name} GEMM runs in high precision and would dequantise the weight in every "
            "call; take a config in which it runs in float8 (convert a converted model back first, "
            "by convert_from_float8_training)"
        )
    if output.format != grad_input.format:
        return (
            f"its two GEMMs read the weight in {output.format} and {grad_input.format}, but it is "
            "stored in one format; leave cast_config_weight_for_grad_input at None"
        )
    g, is_mx = config.plan.grad_input.a, grad_input.scale_format.is_e8m0
    if output.block == ROWWISE and g is not None and g.scaling_type is not ScalingType.DYNAMIC:
        return (
            "its weight has one scale per row, which multiply grad_output before its cast, and "
            f"cast_config_grad_output is {g.scaling_type.value}; give it ScalingType.DYNAMIC"
        )
    is_known = output.block in (TENSORWISE, ROWWISE) and not is_mx
    is_cast_again = output.scale_format.is_e8m0 and is_mx
    if is_known or is_cast_again or output.transposed().block == grad_input.block:
        return None
    return (
        f"its weight has {block_name(output.block)} scales, which grad_input cannot use; use "
        "Tensorwise(), Rowwise() or Blockwise(128, 128) weights, or an MX format"
    )


def refuses_training(weight: Float8Tensor) -> str | None:
    """The reason why this weight can get no gradient, or None; one that is gathered can."""
    if weight.block == TENSORWISE or not (is_resident(weight) and weight.requires_grad):
        return None
    return (
        f"its weight is stored in float8 with one scale for each block {tuple(weight.block)} and "
        "requires a gradient; only tensorwise float8 weights can train. Freeze it with "
        "weight.requires_grad_(False), or convert with a tensorwise recipe"
    )


def to_resident(
    weight: Tensor, config: Float8LinearConfig, state: DelayedState | None = None
) -> Float8Tensor:
    """A high-precision weight (N, K), or (E, N, K), in float8, as the output's GEMM casts it.

    `refuses_resident` must accept ``config``. ``state`` is that of a delayed cast, whose scale is
    used if it has one.
    """
    cast, block = config.plan.output.b, resident_block(weight, config)
    assert cast is not None
    cast = replace(cast, block=block)
    with torch.no_grad(), torch.inference_mode(False):
        source = weight.clone() if weight.is_inference() else weight.detach()
        source = mxfp4.project(source) if config.mxfp4_weights else source
        data, scale, _ = bind_and_cast(source, cast, state, emulate=config.emulate)
        # A delayed or static scale may be shared; the weight needs its own, which ops write to.
        scale = scale.expand(scale_shape(weight.shape, block))  # a static one, of all experts
        return Float8Tensor(data, scale.clone(), block, weight.dtype, None, cast.scales)


def resident_block(weight: Tensor, config: Float8LinearConfig) -> Block:
    """Which elements of a resident weight share a scale: experts share none."""
    cast = config.plan.output.b
    assert cast is not None
    return (1,) * (weight.dim() - 2) + cast.block


def contraction_last(layer: nn.Module, weight: Any) -> Any:
    """A weight of a layer as (N, K) or (E, N, K), or such a weight as the layer has it: a view."""
    is_turned = weight.dim() == 3 and getattr(layer, "is_transposed", False)
    return weight.mT if is_turned else weight


def as_parameter(old: Tensor, data: Tensor, requires_grad: bool) -> nn.Parameter:
    """A Parameter of other data with the attributes that users have set on ``old``.

    Functions are left out: they may refer to ``old`` and keep its memory. So are the parts of a
    `Float8Tensor`.
    """
    new, parts = nn.Parameter(data, requires_grad), Float8Tensor.__annotations__
    for key, value in vars(old).items():
        if not (key.startswith("_") or key in parts or callable(value)):
            setattr(new, key, value)
    return new


@torch.no_grad()
def make_plain(model: nn.Module) -> None:
    """Dequantise every resident float8 weight of ``model``; shared weights stay shared."""
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in weights_of(module).items():
            if not is_resident(weight):
                continue
            if id(weight) not in plain:
                plain[id(weight)] = as_parameter(weight, weight.dequantize(), weight.requires_grad)
            module._parameters[name] = plain[id(weight)]
