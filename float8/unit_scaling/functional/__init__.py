"""Unit-scaled functions: those of ``torch.nn.functional``, with factors for values and gradients.

For inputs and incoming gradients of unit scale, independent and at initialisation, each function
returns a value of unit scale and sends gradients of unit scale back, exactly where its rule is
exact and within a stated band where it is a fitted model. Import it as

    from float8.unit_scaling import functional as U
    y = U.linear(x, weight, bias)

Signatures are torch's, with four additions: ``constraint`` ties factors that must agree
(`float8.unit_scaling.constraints`), ``mult`` sharpens a nonlinear function
(`float8.unit_scaling.functional.multiplier`), ``scale_power`` sets the exponents of a product's
fan, ``tau`` weights a residual branch. Each file holds one kind of operation and the derivation of
its factors; `torch_map` says which function of torch each stands for.
"""

from __future__ import annotations

from typing import Any

from float8.unit_scaling.functional.activations import dropout, gelu, silu, silu_glu, softmax
from float8.unit_scaling.functional.attention import (
    scaled_dot_product_attention,
    sqrt_softmax_attention,
)
from float8.unit_scaling.functional.convolution import conv1d
from float8.unit_scaling.functional.losses import cross_entropy, mse_loss
from float8.unit_scaling.functional.norms import embedding, layer_norm, rms_norm
from float8.unit_scaling.functional.products import (
    linear,
    linear_readout,
    matmul,
    scaled_linear,
    scaled_matmul,
)
from float8.unit_scaling.functional.residual import (
    add,
    residual_add,
    residual_apply,
    residual_split,
)

_OF_REGISTRY = ("register", "torch_map", "unregister")

__all__ = [
    "add",
    "conv1d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "linear_readout",
    "matmul",
    "mse_loss",
    "register",
    "residual_add",
    "residual_apply",
    "residual_split",
    "rms_norm",
    "scaled_dot_product_attention",
    "scaled_linear",
    "scaled_matmul",
    "silu",
    "silu_glu",
    "softmax",
    "sqrt_softmax_attention",
    "torch_map",
    "unregister",
]


def __getattr__(name: str) -> Any:
    # The registry maps to these functions, so it is loaded after them.
    if name in _OF_REGISTRY:
        from float8.unit_scaling import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
