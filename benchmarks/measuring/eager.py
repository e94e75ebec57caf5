"""The time of an eager step on an H100, predicted without one: products, attention, bytes moved.

Like `inductor` for compiled steps. Every other op is priced by the bytes that it reads and writes,
whether a kernel of ours or torch's. Neither the host nor what a kernel reads twice is modelled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from float8.estimate.devices import ANY_PASS, BF16, DEVICES
from float8.estimate.roofline import Shape, gemm_seconds
from float8.kernels.products import TENSORWISE_PRODUCT

aten = torch.ops.aten
H100 = DEVICES["H100"]
PRODUCTS = {aten.mm.default: BF16, aten._scaled_mm.default: TENSORWISE_PRODUCT}
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
        return gemm_seconds(H100, PRODUCTS[op], Shape(M, K, N))
    if op in ATTENTION:
        place, products = ATTENTION[op]
        *batch, tokens, width = operands[place].shape
        return products * torch.Size(batch).numel() * tokens**2 * width / ATTENTION_RATE
    return None


class Step(TorchDispatchMode):
    """Adds up ``seconds`` of the ops that run inside."""

    seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs plain ops, and those come by here
        out = func(*args, **(kwargs or {}))
        seconds = seconds_of(func, args)
        if seconds is not None:
            self.seconds += seconds
        elif not func.is_view and func.overloadpacket.__name__ not in MOVE_NOTHING:
            tensors = [
                x for x in pytree.tree_leaves([(args, kwargs), out]) if isinstance(x, Tensor)
            ]
            moved = sum([x.numel() * x.element_size() for x in tensors])
            self.seconds += H100.pass_seconds(ANY_PASS, moved) if moved else 0.0
            if func is torch.ops.float8.cast.default and args[1] is None and args[2] == [-1, -1]:
                self.seconds += H100.pass_seconds(ANY_PASS, args[0].nbytes)  # finds the scale
        return out
