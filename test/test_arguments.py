"""Bad arguments of every public function raise a TypeError or ValueError, in words.

`CALLS` is the table: public name -> calls of it, each with the arguments that are given bad values
one at a time. A public name without a row fails `test_every_public_name_has_a_row`.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import float8
import float8 as f
import float8.distributed.gradients
import float8.optim
from float8 import Float8Linear, Float8LinearConfig, checkpoints, filters

PACKAGES = (
    "float8",
    "float8.activations",
    "float8.checkpoints",
    "float8.config",
    "float8.distributed.gradients",
    "float8.estimate",
    "float8.convert.filters",
    "float8.numerics",
    "float8.optim",
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))


def converted() -> nn.Module:
    return float8.convert_to_float8_training(model())


def report():
    layers = converted()
    with float8.inspect(layers) as found:
        layers(X)
    return found


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(model().parameters())


def ms_amp(level: object):
    plain = model()
    return float8.ms_amp(plain, torch.optim.AdamW(plain.parameters()), level)


X, W = torch.ones(16, 32), torch.ones(16, 32)
EXPERTS, OFFS = torch.ones(2, 32, 16), torch.tensor([8, 16], dtype=torch.int32)
NOWHERE = "/dev/null/checkpoint"


class NotIt:
    """A value of a type that no argument takes."""


# A bad value, and the letter that marks an argument which takes it.
BAD = {
    "?": lambda: None,
    "s": lambda: "nonsense",
    "l": lambda: [NotIt()],
    "o": lambda: torch.optim.SGD(model().parameters(), lr=1.0),
    "c": lambda: nn.Linear,
    "x": NotIt,
    "n": lambda: -1.5,
}
CONFIG_FIELDS = [
    *(f"cast_config_{operand}" for operand in ("input", "weight", "grad_output")),
    *(f"gemm_config_{gemm}" for gemm in ("output", "grad_input", "grad_weight")),
    *("delayed_scaling", "enable_fsdp_float8_all_gather", "smooth_input", "pad_inner_dim"),
    *("emulate", "enable_amax_init", "enable_pre_and_post_forward"),
    "cast_config_input_for_grad_weight:?",
    "cast_config_weight_for_grad_input:?",
    "cast_config_grad_output_for_grad_weight:?",
]
CONVERT = "config:? module_filter_fn:?c"
SAVE = "layout:?"
STATIC = {"scaling_type": f.ScalingType.STATIC}
# name -> calls: a function, the arguments that it needs (or functions that make them), and the
# names of those that get bad values, each with the letters of the bad values that it takes.
# An empty name is the first argument, by position.
CALLS = {
    "Blockwise": [(f.Blockwise, {"rows": 1, "cols": 1}, "rows cols")],
    "CastConfig": [
        (f.CastConfig, {}, "scaling_type granularity target_dtype:? scale_format"),
        (f.CastConfig, STATIC, "static_scale"),
    ],
    "CompressedTensors": [(checkpoints.CompressedTensors, {}, "granularity static_inputs")],
    "DelayedScalingConfig": [
        (
            f.DelayedScalingConfig,
            {},
            "history_len amax_compute_algo margin remember_nonfinite",
        )
    ],
    "Float8Linear": [
        (Float8Linear, {"in_features": 16, "out_features": 16}, "config:?"),
        (Float8Linear.from_float, {"linear": nn.Linear(16, 16)}, "linear config:?"),
        (Float8Linear(32, 16), {}, "-"),
    ],
    "Float8LinearConfig": [
        (Float8LinearConfig, {}, " ".join(CONFIG_FIELDS)),
        (Float8LinearConfig.from_recipe_name, {}, "-"),
        (Float8LinearConfig.from_torchao, {}, "-"),
        (Float8LinearConfig.from_te_recipe, {}, "-:?"),
    ],
    "Format": [(lambda v: f.Format("x", v).max, {}, "-")],
    "GemmConfig": [(f.GemmConfig, {}, "use_fast_accum:?")],
    **{
        name: [
            (getattr(f, name), {}, "-"),
            (getattr(f, name), {"normalized_shape": 16}, "config:?"),
        ]
        for name in ("LayerNormCast", "RMSNormCast")
    },
    "accurate_layers": [
        (f.accurate_layers, {"report": report, "min_sqnr": 20.0}, "report min_sqnr:n")
    ],
    "cached_weights": [(f.cached_weights, {"model": converted}, "model in_place dtype:?")],
    "calibrate": [(f.calibrate, {"model": model, "batches": [X]}, "model batches config:?")],
    "compare": [(f.compare, {"model": converted, "batch": X}, "model batch loss_fn:?c layers:?l")],
    "convert_from_float8_training": [(f.convert_from_float8_training, {}, "-")],
    "convert_to_float8_inference": [
        (f.convert_to_float8_inference, {"model": model}, f"model {CONVERT}")
    ],
    "convert_to_float8_training": [
        (f.convert_to_float8_training, {"module": model}, f"module {CONVERT}")
    ],
    "estimate": [(f.estimate, {"model": model, "tokens": 16}, "model tokens device recipes")],
    "faster_layers": [
        (f.faster_layers, {"recipe": "tensorwise", "tokens": 16}, "recipe tokens device")
    ],
    "find_nan": [(f.find_nan, {"model": converted, "batch": X}, "model batch loss_fn:?c")],
    "float8_linear": [(f.float8_linear, {"input": X, "weight": W}, "input weight bias:? config:?")],
    "grouped_mm": [(f.grouped_mm, {"x": X, "w": EXPERTS, "offs": OFFS}, "x w offs config:?")],
    "register_experts": [
        (f.register_experts, {}, "-:c"),
        (lambda v: f.register_experts(type("Own", (nn.Module,), {}), v), {}, "-:?c"),
    ],
    "Float8ExpertParallel": [(f.Float8ExpertParallel, {}, "config:?")],
    "fuse_feed_forwards": [(f.fuse_feed_forwards, {"model": model}, "model")],
    "fuse_norms": [(f.fuse_norms, {"model": model, "pairs": {}}, "model pairs")],
    "high_precision": [(f.high_precision, {}, "-")],
    "inspect": [(f.inspect, {}, "-")],
    "inspect_every": [(f.inspect_every, {"model": converted}, "model n on_alarm:?c")],
    "ms_amp": [
        (lambda v: f.ms_amp(v, optimizer(), "O2"), {}, "-"),
        (lambda v: f.ms_amp(model(), v, "O2"), {}, "-"),
        (ms_amp, {}, "-"),
    ],
    "precompute_float8_dynamic_scale_for_fsdp": [
        (f.precompute_float8_dynamic_scale_for_fsdp, {}, "-")
    ],
    "ScalingType": [(f.ScalingType, {}, "-")],
    "saved_activations": [
        (
            f.saved_activations,
            {},
            "model:? skip min_size",
        )
    ],
    **{
        name: [(getattr(f, name), {"model": converted}, "model group:?")]
        for name in ("sync_float8_amax_and_scale_history", "after_step")
    },
    # float8.checkpoints
    "load": [(checkpoints.load, {"model": model, "path": "folder"}, "model weights ignore:l")],
    "plan_save": [(checkpoints.plan_save, {"model": converted}, f"model {SAVE}")],
    "save_pretrained": [
        (
            checkpoints.save_pretrained,
            {"model": converted, "folder": NOWHERE},
            f"model {SAVE} overwrite",
        )
    ],
    "weight_updates": [(checkpoints.weight_updates, {"model": converted}, "model layout:?")],
    "float8_gradients": [(f.distributed.gradients.float8_gradients, {}, "-")],
    # float8.filters
    "skip_names": [(filters.skip_names, {}, "-:s")],
    # float8.numerics: paths
    "load_run": [(f.numerics.load_run, {}, "-:s")],
    "load_alarms": [(f.numerics.load_alarms, {}, "-:s")],
    # float8.optim
    **{
        name: [(getattr(f.optim, name), {}, "-")]
        for name in ("AdamW", "Adam", "SGD", "Lion", "Muon")
    },
    "float32_state_dict": [(f.optim.float32_state_dict, {}, "-:o")],
    "report": [(f.optim.report, {}, "-")],
}

# Not functions that a user calls with values of their own: results, and rows of tables that other
# functions make; and torch's own parallel styles and clipping, whose arguments torch checks.
NO_CALLS = {
    *("Alarm", "ScaleFormat"),
    *("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"),
    "clip_grad_norm_",
    *("ModelOpt", "Rowwise", "Tensorwise"),  # which take none
    # Python reports wrong types where they are used.
    *("FineGrained", "Float8Tensor", "all_of", "divisible_by", "min_features", "min_size"),
}


def public_callables() -> set[str]:
    found = set()
    for name in PACKAGES:
        package = importlib.import_module(name)
        if not hasattr(package, "__all__"):  # a module: what it defines
            own = [
                k
                for k, v in vars(package).items()
                if getattr(v, "__module__", "") == package.__name__
            ]
            found |= {k for k in own if not k.startswith("_")}
        else:
            found |= {k for k in package.__all__ if callable(getattr(package, k))}
    return found


def test_every_public_name_has_a_row():
    assert public_callables() - {*CALLS, *NO_CALLS} == set()
    assert {*CALLS, *NO_CALLS} - public_callables() - {"inspect"} == set()


def outcome(function, arguments, name: str, bad: object) -> str:
    """The reason why a call's answer to a bad value is wrong, or nothing."""
    makes = {k: v() if inspect.isfunction(v) else v for k, v in arguments.items()}
    try:
        result = function(bad) if name == "-" else function(**makes | {name: bad})
        if isinstance(result, AbstractContextManager) and not isinstance(result, nn.Module):
            with result:
                pass
    except (TypeError, ValueError) as error:
        words = ("object has no attribute", "unexpected keyword", "missing 1 required")
        return str(error) if any(raw in str(error) for raw in words) else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "was accepted"


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_is_refused_in_words(name):
    wrong = [
        f"{name}({argument}={kind}): {found}"
        for function, arguments, spec in CALLS[name]
        for argument, _, taken in (each.partition(":") for each in spec.split())
        for kind, make in BAD.items()
        if kind not in taken and (found := outcome(function, arguments, argument, make()))
    ]
    assert wrong == []
