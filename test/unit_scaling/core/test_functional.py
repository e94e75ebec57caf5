"""`float8.unit_scaling.core.functional`: parts, and the example of an operation made of them."""

import importlib

import torch
from scale_assertions import assert_unit_scaled, gradients

import float8.unit_scaling as uu


def test_every_name_is_there_under_the_top():
    core = importlib.import_module("float8.unit_scaling.core.functional")
    assert uu.core.functional is core
    assert all(getattr(core, name) is not None for name in core.__all__)
    assert core.transformer_residual_scaling_rule is uu.transformer_residual_scaling_rule


def test_the_tanh_of_the_docstring_has_unit_scale():
    x = torch.randn(40000, generator=torch.Generator().manual_seed(0))
    scaled = uu.core.functional.scale_elementwise(torch.tanh, 1.59, 1.47, None)
    out, grad = gradients(scaled, x)
    assert_unit_scaled(out, band=0.01)
    assert_unit_scaled(grad, band=0.01)
