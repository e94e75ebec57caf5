"""Unit-scaled functions: those of ``torch.nn.functional``, with factors for values and gradients.

For inputs and incoming gradients of unit scale, independent and at initialisation, each function
returns a value of unit scale and sends gradients of unit scale back: exactly where its rule is
exact, within a stated band where it is a fitted model. Import it as

    from float8.unit_scaling import functional as U
    y = U.linear(x, weight, bias)

Arguments are torch's, in torch's order; docstrings describe only what is different. There are four
additions:

- ``constraint`` ties factors that must agree (`float8.unit_scaling.constraints`).
- ``mult`` says how sharp a nonlinear function is: it multiplies the input first. Inputs of unit
  scale see a fixed part of such a function. A small ``mult`` shows the part where it is linear or
  flat, a large one a ramp or a step. It is a hyperparameter of u-muP (arXiv 2407.17465,
  appendix B). Factors depend on it, so that the output's scale does not.
- ``scale_power`` sets the exponents of a product's numbers of terms.
- ``tau`` weights a residual branch.

Each file holds one kind of operation and the derivation of its factors. `torch_map` says which
function of torch each stands for.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from float8.unit_scaling.functional.activations import dropout, gelu, silu, silu_glu, softmax
from float8.unit_scaling.functional.attention import (
    scaled_dot_product_attention,
    sqrt_softmax_attention,
)
from float8.unit_scaling.functional.losses import cross_entropy, mse_loss
from float8.unit_scaling.functional.products import (
    conv1d,
    linear,
    linear_readout,
    matmul,
)
from float8.unit_scaling.functional.residual import (
    add,
    embedding,
    layer_norm,
    residual_add,
    residual_apply,
    residual_split,
    rms_norm,
)
from float8.unit_scaling.registry import register, torch_map

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
    "silu",
    "silu_glu",
    "softmax",
    "sqrt_softmax_attention",
    "torch_map",
]

for _function in (
    *(torch.matmul, F.linear, F.conv1d, F.scaled_dot_product_attention, F.embedding, torch.add),
    *(F.gelu, F.silu, F.softmax, torch.softmax, F.dropout, F.layer_norm, F.rms_norm),
    *(F.cross_entropy, F.mse_loss),
):
    register(_function, globals()[_function.__name__])
