"""Unit scaling: models whose weights, activations and gradients all start with unit scale.

The range of float8 is small. Unit scaling (arXiv 2303.11257) builds models whose tensors are in the
middle of it: weights start from N(0, 1), and each operation divides its results, forward and
backward, by the factor by which it multiplies scales. u-muP (arXiv 2407.17465) adds learning rates
that hold for every width and depth. Float8 products then need no scales measured at run time::

    import float8.unit_scaling as uu
    from float8.unit_scaling import functional as U

    model = uu.TransformerDecoder(
        hidden_size=256, vocab_size=1000, layers=4, heads=4, rotary_base=10_000.0
    )
    optimizer = uu.optim.AdamW(model.parameters(), lr=0.5)
    model.loss(torch.randint(1000, (8, 128))).backward()

`functional` (U) has the operations, `scale`, `constraints` and `core` their parts, this package the
modules. `parameter` and `optim` give learning rates. `transforms` change the numbers that a model
computes with, `analysis` shows its scales. The names are those of the package ``unit-scaling``,
`utils` too; docs/migrating/unit_scaling.md lists the differences.
"""

from __future__ import annotations

from float8.unit_scaling import analysis, core, functional, optim, parameter, transforms, utils
from float8.unit_scaling.core.functional import transformer_residual_scaling_rule
from float8.unit_scaling.modules.layers import (
    GELU,
    Conv1d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    LinearReadout,
    RMSNorm,
    SiLU,
    Softmax,
)
from float8.unit_scaling.modules.transformer import (
    MHSA,
    MLP,
    DepthModuleList,
    DepthSequential,
    TransformerDecoder,
    TransformerLayer,
    TransformerStack,
)
from float8.unit_scaling.parameter import MupType, Parameter
from float8.version import __version__

__all__ = [
    "GELU",
    "MHSA",
    "MLP",
    "Conv1d",
    "CrossEntropyLoss",
    "DepthModuleList",
    "DepthSequential",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "MupType",
    "Parameter",
    "RMSNorm",
    "SiLU",
    "Softmax",
    "TransformerDecoder",
    "TransformerLayer",
    "TransformerStack",
    "__version__",
    "analysis",
    "core",
    "functional",
    "optim",
    "parameter",
    "transformer_residual_scaling_rule",
    "transforms",
    "utils",
]
