"""Modules that moved are found at their old places, by imports, pickles and checkpoints."""

import importlib
import io

import pytest
import torch
from assertions import assert_same_float8

import float8
from float8 import Float8Tensor
from float8.old_paths import MOVED

# What pickles of version 0.7 name.
PICKLED = {
    "float8.activations.saved": ("_same",),
    "float8.cast": ("DelayedCast", "DynamicCast", "NoCast", "StaticCast"),
    "float8.conversion": ("Conversion",),
    "float8.fused": ("LayerNormCast", "RMSNormCast", "SwiGLU", "SwiGLUCast"),
    "float8.levels": ("MsAmp",),
    "float8.linear": ("Float8CastingLinear", "Float8Linear"),
    "float8.ms_amp": ("_AfterLoad", "ms_amp"),
    "float8.switch": ("Switch",),
    "float8.tensor": ("Float8Tensor", "_rebuild"),
    "float8.unit_scaling.float8_layers": ("Float8UnitLinear", "Float8UnitLinearReadout"),
    "float8.unit_scaling.learning_rates": ("lr_scale_func_adam", "_sgd_behind_constrained_readout"),
    "float8.unit_scaling.modules.norms": ("LayerNorm", "RMSNorm"),
}


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_import_path_is_the_module_at_its_new_place(old):
    assert importlib.import_module(old) is importlib.import_module(MOVED[old])
    assert getattr(float8, old.partition(".")[2]) is importlib.import_module(MOVED[old])


@pytest.mark.parametrize("old", PICKLED)
def test_what_old_pickles_name_is_there(old):
    module = importlib.import_module(old)
    assert [name for name in PICKLED[old] if not hasattr(module, name)] == []


def test_a_checkpoint_that_names_old_paths_loads_weights_only(monkeypatch):
    x = Float8Tensor.from_high_precision(torch.randn(4, 8), torch.float8_e4m3fn)
    file = io.BytesIO()
    old = importlib.import_module("float8.tensor")
    with monkeypatch.context() as patch:
        patch.setattr(old.Float8Tensor, "__module__", old.__name__)
        patch.setattr(old._rebuild, "__module__", old.__name__)
        torch.save(x, file)
    assert b"float8.tensor\n_rebuild" in file.getvalue()
    file.seek(0)
    assert_same_float8(torch.load(file, weights_only=True), x)
