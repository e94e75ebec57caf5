"""The configuration of a float8 linear layer, and its resolution into casts and GEMMs.

A linear layer is three GEMMs of two casts each (M tokens, K in, N out features)::

    output_MN      = x_MK @ w_NK.T        contraction K
    grad_input_MK  = g_MN @ w_KN.T        contraction N
    grad_weight_NK = g_NM @ x_KM.T        contraction M

`Float8LinearConfig` speaks of operands (input, weight, grad_output), each of which is used twice.
`Float8LinearConfig.gemms` resolves it into three `GemmCasts`, each with the `OperandCast` of its
two operands. Everything is frozen: ``dataclasses.replace`` makes a variant, nothing is inherited or
changed behind the user's back.

============= ====================================================================
``casts.py``  how one operand becomes float8, and where its scale comes from
``gemms.py``  the three GEMMs that a config asks for
``linear.py`` the configuration of a layer, and `RECIPES`
============= ====================================================================

This package knows no other framework. The constructors of `Float8LinearConfig` that translate
other libraries' configs are in `float8.integrations`.
"""

# Names that are imported as themselves are for the packages above.
from float8.config.casts import CastConfig, DelayedScalingConfig, ScalingType
from float8.config.casts import OperandCast as OperandCast
from float8.config.gemms import GemmCasts as GemmCasts
from float8.config.gemms import GemmConfig
from float8.config.linear import RECIPES, Float8LinearConfig
from float8.config.linear import check_config as check_config

__all__ = [
    "RECIPES",
    "CastConfig",
    "DelayedScalingConfig",
    "Float8LinearConfig",
    "GemmConfig",
    "ScalingType",
]
