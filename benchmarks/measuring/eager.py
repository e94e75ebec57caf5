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


def finds_scale(op: Any, operands: Sequence[Any]) -> bool:
    """Whether a float8 op reads its operands twice, the first time for the amax of a matrix."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, operands, strict=False))
    is_missing = given.get("scale", op) is None or given.get("gate_scale", op) is None
    return is_missing and list(given.get("block", (-1, -1))) == [-1, -1]


class Step(PlainOps):
    """Adds up ``seconds`` of the ops that run inside."""

    seconds = 0.0

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
            twice = func.namespace == "float8" and finds_scale(func, args)
            for moved in (read + written, read if twice else 0):
                self.seconds += H100.pass_seconds(ANY_PASS, moved) if moved else 0.0
