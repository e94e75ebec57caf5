"""The time of an eager step on an H100, predicted without one: products, attention, bytes moved.

Like `inductor` for compiled steps. Every other op is priced by the bytes that it reads and writes,
whether a kernel of ours or torch's. Neither the host nor what a kernel reads twice is modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.measuring.memory import PlainOps
from float8.estimate.devices import ANY_PASS, BF16, DEVICES
from float8.estimate.roofline import Shape, gemm_seconds
from float8.kernels.products import TENSORWISE_PRODUCT

aten = torch.ops.aten
H100 = DEVICES["H100"]
PRODUCTS = {aten.mm.default: BF16, aten._scaled_mm.default: TENSORWISE_PRODUCT}
# Gradients (E5M2 by E4M3) that sum fast take this part of the time of precise ones: 0.952 and 0.933
# in results/h100_2026-11-27/gemms.txt. The one tensorwise rate of the model stands for precise
# gradients: there they took 1.05 and 0.98 of the predicted time, fast outputs 0.86 and 0.87.
FAST_GRADIENTS = 0.942
# Causal attention, forward and backward (2 and 5 products). What products and bytes leave of the
# compiled float8 steps in results/h100_2026-11-27/bench_model.json is 442 and 423 TFLOP/s.
ATTENTION_RATE = 442e12
# op -> the place of the query among its arguments, and how many products it makes
ATTENTION = {
    aten._scaled_dot_product_cudnn_attention.default: (0, 2),
    aten._scaled_dot_product_cudnn_attention_backward.default: (1, 5),
    aten._scaled_dot_product_flash_attention.default: (0, 2),
    aten._scaled_dot_product_flash_attention_backward.default: (1, 5),
}
MOVE_NOTHING = ("empty", "new_empty", "empty_like", "_unsafe_view", "detach")


def seconds_of(op: Any, operands: list[Any]) -> float | None:
    """Of a product or attention; None of other ops."""
    if op in PRODUCTS:
        (M, K), (_, N) = (each.shape for each in operands[:2])
        is_fast = operands[0].dtype == torch.float8_e5m2 and True in operands[7:]
        seconds = gemm_seconds(H100, PRODUCTS[op], Shape(M, K, N))
        return seconds * (FAST_GRADIENTS if is_fast else 1)
    if op in ATTENTION:
        place, products = ATTENTION[op]
        *batch, tokens, width = operands[place].shape
        return products * torch.Size(batch).numel() * tokens**2 * width / ATTENTION_RATE
    return None


def finds_scale(op: Any, operands: Sequence[Any]) -> bool:
    """Whether a float8 op reads its operands twice, the first time for the amax of a matrix."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, operands, strict=False))
    is_missing = given.get("scale", op) is None or given.get("gate_scale", op) is None
    return is_missing and list(given.get("block", (-1, -1))) == [-1, -1]


class Step(PlainOps):
    """Adds up ``seconds`` of the ops that run inside, and as `inductor.Predicted` the others."""

    seconds, moved, launches = 0.0, 0, 0

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any] | None, out: Any) -> None:
        """Price it."""
        seconds = seconds_of(func, args)
        if seconds is not None:
            self.seconds += seconds
        elif not func.is_view and func.overloadpacket.__name__ not in MOVE_NOTHING:
            read, written = [
                sum([x.nbytes for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)])
                for tree in ((args, kwargs), out)
            ]
            is_ours = func.namespace == "float8"
            twice = is_ours and finds_scale(func, args)
            for moved in filter(None, (read + written, read if twice else 0)):
                self.seconds += H100.pass_seconds(ANY_PASS, moved)
                self.moved += moved
                self.launches += is_ours
