"""A float8 layer as standard ONNX operators, for ``torch.onnx.export(model, args, dynamo=True)``.

The weight stays in float8 in the file (FLOAT8E4M3FN) and is dequantised where it is read. The input
is cast to float8 and back before the product::

    x -- QuantizeLinear -- DequantizeLinear --+
                                              +-- MatMul -- Add -- y
    weight data ---------- DequantizeLinear --+

A runtime with float8 products replaces this pattern by one of them. Any other runtime computes the
same numbers in float32, up to the rounding of sums. The shape of a scale in ONNX, by the block of
its matrix:

=============== ============================ ======================================
block of (N, K) scale in ONNX                attributes
=============== ============================ ======================================
whole tensor    ()                           none
row (1, K)      (N,)                         ``axis=0``
(R, C)          (N, ceil(K / C)), each row   ``axis=1, block_size=C``
                R times
=============== ============================ ======================================

Under `float8.high_precision` the input stays in high precision, and the weight in float8. Dynamic
scales of inputs are computed in the graph. The nodes are those of opset 21: torch refuses
a lower ``opset_version``, its default among them, with "Target opset ... less than node version".

Two rules of ONNX differ from those of `float8.kernels.definition.cast_by_scale`. It divides by the
scale, where the library multiplies by the rounded reciprocal: a value near the middle of two codes
may get the other one, unless the scale is a power of two. And an infinite input becomes the largest
value, not NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import OperandCast
from float8.formats import E4M3, ScaleFormat
from float8.granularity import WHOLE, Block
from float8.kernels import definition
from float8.linear.autograd import Call
from float8.linear.casts import DelayedState, known_scale
from float8.tensor import Float8Tensor

OPSET = 21  # the first one with blocks, and with an output_dtype
_E4M3 = 17  # onnx.TensorProto.FLOAT8E4M3FN


def to_onnx() -> bool:
    """Whether torch.onnx.export traces."""
    return torch.onnx.is_in_onnx_export()


to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo takes it for False


def linear_in_onnx(layer: Any, input: Tensor, call: Call) -> Tensor:
    """The output of a `Float8Linear`, as nodes of the ONNX graph that is being traced.

    ``input`` is (..., K); the result is (..., N) in the compute dtype. Raises ValueError if the
    layer cannot be part of an ONNX file.
    """
    plan, factor, weight, cast = call.plan, call.factors[0], layer.weight, call.plan.output.a
    if (reason := _reason_against(weight, input, cast)) is not None:
        raise ValueError(f"{layer._name}: {reason}")
    assert cast is not None
    x_MK = input.reshape(-1, input.shape[-1]).to(plan.dtype).float()
    scale = _scale(x_MK, cast, call.states[0])
    x8_MK = _quantize(x_MK, scale, cast.block)
    w_NK = _dequantize(weight.float8_data, weight.scale, weight.block)
    out = F.linear(_dequantize(x8_MK, scale, cast.block), w_NK)
    out = out if layer.bias is None else out + layer.bias.to(plan.dtype).float()
    out = out if factor is None else out * factor
    return out.to(plan.dtype).reshape(*input.shape[:-1], weight.shape[0])


def weight_in_onnx(weight: Float8Tensor) -> Tensor:
    """A float8 weight in high precision, for a product in high precision.

    Raises ValueError if its scales are E8M0.
    """
    if weight.scale.dtype != torch.float32:
        raise ValueError(
            f"torch.onnx.export takes no scales of {weight.scale.dtype}: export what "
            "float8.convert_from_float8_training(model) returns"
        )
    return _dequantize(weight.float8_data, weight.scale, weight.block).to(weight.dtype)


def _reason_against(weight: Tensor, input: Tensor, cast: OperandCast | None) -> str | None:
    """The reason why a layer cannot be part of an ONNX file, or None."""
    if not isinstance(weight, Float8Tensor):
        return (
            "torch.onnx.export stores float8 weights: call "
            "float8.convert_to_float8_inference(model) first, or export in "
            "`with float8.high_precision(model):`"
        )
    if isinstance(input, Float8Tensor):
        return "torch.onnx.export takes no inputs in float8: leave float8.fuse_norms out"
    formats = (weight.float8_data.dtype, None if cast is None else cast.dtype)
    has_rows = cast is not None and cast.block[0] in (1, WHOLE)
    is_float32 = weight.scale.dtype == torch.float32
    if not (is_float32 and has_rows) or formats != (E4M3.dtype, E4M3.dtype):
        return (
            f"torch.onnx.export takes {E4M3.dtype} with scales of float32 (of inputs, by tensor, "
            f"row or part of it), not {formats[0]} and {formats[1]} with scales of "
            f"{weight.scale.dtype}: take a recipe such as rowwise, or convert_from_float8_training"
        )
    return None


def _quantize(x_MK: Tensor, scale: Tensor, block: Block) -> Tensor:
    return _node("QuantizeLinear", x_MK, scale, block, E4M3.dtype, output_dtype=_E4M3)


def _dequantize(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    return _node("DequantizeLinear", data, scale, block, torch.float32)


def _node(
    name: str, x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, **attributes: Any
) -> Tensor:
    """A node of this name; ``scale`` has the shape ``ceil(x.shape / block)``."""
    from torch.onnx.ops import symbolic

    rows, cols = block
    if cols != WHOLE:
        scale = scale if rows == 1 else scale.repeat_interleave(rows, 0)[: x.shape[0]]
        attributes |= {"axis": 1, "block_size": cols}
    elif rows != WHOLE:
        scale, attributes = scale.reshape(-1), attributes | {"axis": 0}
    else:
        scale = scale.reshape(())
    return symbolic(name, (x, scale), attributes, dtype=dtype, shape=x.shape, version=OPSET)


def _scale(x_MK: Tensor, cast: OperandCast, state: DelayedState | None) -> Tensor:
    """The scale of an input, of shape ``ceil(x.shape / block)``."""
    if (known := known_scale(cast, state, x_MK)) is not None:
        return known
    scale = definition.scale_from_amax(definition.amax(x_MK, cast.block), cast.largest)
    if cast.scales == ScaleFormat.FLOAT32.value:
        return scale
    # To the nearest power of two, by the split of Veltkamp and Dekker, and up: ONNX cannot read
    # bits. In float64 nothing overflows and every step is exact.
    double = scale.double()
    carried = double * (2.0**52 + 1)
    nearest = carried - (carried - double)
    return torch.where(nearest < double, nearest * 2, nearest).float()
