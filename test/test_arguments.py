"""Bad arguments of every public function raise a TypeError or ValueError that says what is wanted.

`CALLS` is the table: public name -> calls of it, each with one place for a bad value. A public name
without a row fails `test_every_public_name_has_a_row`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import float8
import float8.distributed.gradients
import float8.optim
from float8 import E4M3, Float8Linear, Float8LinearConfig, Float8Tensor, checkpoints, filters
from float8.arguments import check_integer, check_module, check_tensors, described

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


def codes() -> torch.Tensor:
    return torch.ones(4).to(torch.float8_e4m3fn)


def report():
    layers = converted()
    with float8.inspect(layers) as found:
        layers(X)
    return found


def ms_amp_level(level: object):
    plain = model()
    return float8.ms_amp(plain, torch.optim.AdamW(plain.parameters()), level)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(model().parameters())


X, W = torch.ones(16, 32), torch.ones(16, 32)
EXPERTS, OFFS = torch.ones(2, 32, 16), torch.tensor([8, 16], dtype=torch.int32)


class NotIt:
    """A value of a type that no argument takes."""


BAD = {
    "None": lambda: None,
    "a string": lambda: "nonsense",
    "a list": lambda: [NotIt()],
    "an optimizer": lambda: torch.optim.SGD(model().parameters(), lr=1.0),
    "a class": lambda: nn.Linear,
    "an object": NotIt,
    "a number": lambda: -1.5,
}


class Call:
    """A call with a hole: ``run(bad)``, what its message says, and which bad values are good."""

    def __init__(self, run, says: str = "", takes: tuple[str, ...] = ()) -> None:
        self.run, self.says, self.takes = run, says, takes


ANYTHING = tuple(BAD)
NONE = ("None",)
MODULE = r"must be an nn\.Module, got "
CONFIG = "(config must be a Float8LinearConfig, got |unknown recipe )"
TENSOR = r"must be a torch\.Tensor, got "

f = float8
CONFIG_FIELDS = {
    **{f"cast_config_{o}": "must be a CastConfig" for o in ("input", "weight", "grad_output")},
    **{f"gemm_config_{g}": "must be a GemmConfig" for g in ("output", "grad_input", "grad_weight")},
    "delayed_scaling": "must be a DelayedScalingConfig",
    **{
        name: "must be True or False"
        for name in (
            "enable_fsdp_float8_all_gather",
            "smooth_input",
            "pad_inner_dim",
            "emulate",
            "enable_amax_init",
            "enable_pre_and_post_forward",
        )
    },
}
SECOND_USES = (
    "cast_config_input_for_grad_weight",
    "cast_config_weight_for_grad_input",
    "cast_config_grad_output_for_grad_weight",
)
OPTIMIZER = [
    Call(lambda v, n=n: getattr(f.optim, n)(v), "params|optimizer can only optimize")
    for n in ("AdamW", "Adam", "SGD", "Lion")
]


def of_config(field: str):
    return lambda v: Float8LinearConfig(**{field: v})


def norm(name: str):
    return [
        Call(getattr(f, name)),
        Call(lambda v: getattr(f, name)(16, config=v), f"{name}: {CONFIG}", NONE),
    ]


def converter(name: str, argument: str = "model"):
    return [
        Call(getattr(f, name), f"{name}: {argument} {MODULE}"),
        Call(lambda v: getattr(f, name)(model(), config=v), f"{name}: {CONFIG}", NONE),
        Call(
            lambda v: getattr(f, name)(model(), module_filter_fn=v),
            f"{name}: module_filter_fn must be callable, got ",
            (*NONE, "a class"),
        ),
    ]


NOWHERE = "/dev/null/checkpoint"
PATH = ("a string",)


def save_arguments(name: str, *folder: str):
    def call(**options: object):
        return getattr(checkpoints, name)(converted(), *folder, **options)

    return [
        Call(lambda v: getattr(checkpoints, name)(v, *folder), MODULE),
        Call(lambda v: call(layout=v), "layout", NONE),
        Call(lambda v: call(input_scales=v), "input_scales must be a mapping", NONE),
        Call(lambda v: call(recast=v), "must be True or False"),
        Call(lambda v: call(max_shard_bytes=v), "max_shard_bytes must be "),
    ]


CALLS: dict[str, list[Call]] = {
    "Blockwise": [Call(lambda v: f.Blockwise(v, 1), "rows"), Call(lambda v: f.Blockwise(1, v))],
    "CastConfig": [
        Call(lambda v: f.CastConfig(scaling_type=v), "scaling_type must be a ScalingType"),
        Call(lambda v: f.CastConfig(granularity=v), "granularity must be a Granularity"),
        Call(lambda v: f.CastConfig(target_dtype=v), "is not a float8 format", NONE),
        Call(lambda v: f.CastConfig(scale_format=v), "scale_format must be a ScaleFormat"),
        Call(lambda v: f.CastConfig(f.ScalingType.STATIC, static_scale=v), "static_scale"),
    ],
    "CompressedTensors": [
        Call(checkpoints.CompressedTensors, "granularity must be a Granularity"),
        Call(lambda v: checkpoints.CompressedTensors(static_inputs=v), "must be True or False"),
    ],
    "DelayedScalingConfig": [
        *(
            Call(lambda v, n=n: f.DelayedScalingConfig(**{n: v}), n)
            for n in ("history_len", "amax_compute_algo", "margin", "interval")
        ),
        Call(lambda v: f.DelayedScalingConfig(remember_nonfinite=v), "must be True or False"),
    ],
    "FineGrained": [
        Call(checkpoints.FineGrained, "block must be|Blockwise: rows"),
        Call(lambda v: checkpoints.FineGrained((v, 128)), "rows"),
        Call(
            lambda v: checkpoints.FineGrained(scale_format=v), "scale_format must be a ScaleFormat"
        ),
    ],
    "Float8Linear": [
        Call(lambda v: Float8Linear(16, 16, config=v), CONFIG, NONE),
        Call(Float8Linear.from_float, r"must be an nn\.Linear, got"),
        Call(lambda v: Float8Linear.from_float(nn.Linear(16, 16), v), CONFIG, NONE),
        Call(Float8Linear(32, 16), TENSOR),
    ],
    "Float8LinearConfig": [
        *(Call(of_config(name), f"{name} {says}") for name, says in CONFIG_FIELDS.items()),
        *(Call(of_config(name), f"{name} must be a CastConfig", NONE) for name in SECOND_USES),
        Call(Float8LinearConfig.from_recipe_name, "a recipe is named by a string|unknown recipe"),
        Call(Float8LinearConfig.from_torchao, "takes a torchao|needs torchao"),
        Call(Float8LinearConfig.from_te_recipe, "", NONE),
    ],
    "Float8Tensor": [
        Call(lambda v: Float8Tensor(v, torch.ones(1), (-1,), torch.float32), f"data {TENSOR}"),
        Call(lambda v: Float8Tensor(codes(), v, (-1,), torch.float32), f"scale {TENSOR}"),
        Call(
            lambda v: Float8Tensor(codes(), torch.ones(1), v, torch.float32), "block", ("a list",)
        ),
        Call(lambda v: Float8Tensor(codes(), torch.ones(1), (-1,), v), "'dtype'|float32, bfloat16"),
        Call(lambda v: Float8Tensor.from_high_precision(v, E4M3), f"x {TENSOR}"),
        Call(lambda v: Float8Tensor.from_high_precision(X, v), "is not a float8 format"),
        Call(lambda v: Float8Tensor.from_high_precision(X, E4M3, v), "must be a Gran", NONE),
        Call(lambda v: Float8Tensor.from_high_precision(X, E4M3, scale=v), "scale must be", NONE),
        Call(
            lambda v: Float8Tensor.from_high_precision(X, E4M3, scale_format=v),
            "scale_format must be a ScaleFormat",
        ),
    ],
    "Format": [Call(lambda v: f.Format("x", v).max)],
    "GemmConfig": [Call(lambda v: f.GemmConfig(use_fast_accum=v), "must be True or False")],
    "LayerNormCast": norm("LayerNormCast"),
    "RMSNormCast": norm("RMSNormCast"),
    "SwiGLUCast": [Call(lambda v: f.SwiGLUCast(config=v), f"SwiGLUCast: {CONFIG}", NONE)],
    "accurate_layers": [
        Call(lambda v: f.accurate_layers(v, 20.0), "takes what float8.inspect or float8.compare"),
        Call(lambda v: f.accurate_layers(report(), v), "min_sqnr must be a number", ("a number",)),
        Call(lambda v: f.accurate_layers(report(), 20.0, by=v), "by ", NONE),
    ],
    "cached_weights": [
        Call(f.cached_weights, f"cached_weights: model {MODULE}"),
        Call(lambda v: f.cached_weights(converted(), v), "in_place must be True or False"),
        Call(lambda v: f.cached_weights(converted(), dtype=v), "dtype must be one of", NONE),
        Call(lambda v: f.cached_weights(converted(), scales_only=v), "scales_only must be True or"),
    ],
    "calibrate": [
        Call(lambda v: f.calibrate(v, [X]), f"calibrate: model {MODULE}"),
        Call(lambda v: f.calibrate(model(), v), "batches|must be Tensor"),
        Call(lambda v: f.calibrate(model(), [X], config=v), f"calibrate: {CONFIG}", NONE),
        Call(lambda v: f.calibrate(model(), [X], method=v), "method must be one of"),
        Call(lambda v: f.calibrate(model(), [X], percentile=v), "percentile must be"),
    ],
    "compare": [
        Call(lambda v: f.compare(v, X), f"compare: model {MODULE}"),
        Call(lambda v: f.compare(converted(), v)),
        Call(lambda v: f.compare(converted(), X, loss_fn=v), "loss_fn must", (*NONE, "a class")),
        Call(lambda v: f.compare(converted(), X, layers=v), "layers", NONE),
    ],
    "convert_from_float8_training": [Call(f.convert_from_float8_training, f"module {MODULE}")],
    "convert_to_float8_inference": [
        *converter("convert_to_float8_inference"),
        Call(lambda v: f.convert_to_float8_inference(model(), v), "static_scales must map", NONE),
    ],
    "convert_to_float8_training": converter("convert_to_float8_training", "module"),
    "estimate": [
        Call(lambda v: f.estimate(v, 16), "model=|beside shapes"),
        Call(lambda v: f.estimate(model(), v), "tokens="),
        Call(lambda v: f.estimate(model(), 16, v), "device"),
        Call(lambda v: f.estimate(model(), 16, recipes=v), "recipe"),
    ],
    "faster_layers": [
        Call(lambda v: f.faster_layers(v, 16), "recipe"),
        Call(lambda v: f.faster_layers("tensorwise", v), "tokens="),
        Call(lambda v: f.faster_layers("tensorwise", 16, v), "device"),
    ],
    "find_nan": [
        Call(lambda v: f.find_nan(v, X), f"find_nan: model {MODULE}"),
        Call(lambda v: f.find_nan(converted(), v)),
        Call(lambda v: f.find_nan(converted(), X, loss_fn=v), "loss_fn must", (*NONE, "a class")),
    ],
    "float8_linear": [
        Call(lambda v: f.float8_linear(v, W), f"input {TENSOR}"),
        Call(lambda v: f.float8_linear(X, v), f"weight {TENSOR}"),
        Call(lambda v: f.float8_linear(X, W, v), f"bias {TENSOR}", NONE),
        Call(lambda v: f.float8_linear(X, W, None, v), f"float8_linear: {CONFIG}", NONE),
    ],
    "grouped_mm": [
        Call(lambda v: f.grouped_mm(v, EXPERTS, OFFS), f"grouped_mm: x {TENSOR}"),
        Call(lambda v: f.grouped_mm(X, v, OFFS), f"grouped_mm: w {TENSOR}"),
        Call(lambda v: f.grouped_mm(X, EXPERTS, v), f"grouped_mm: offs {TENSOR}"),
        Call(lambda v: f.grouped_mm(X, EXPERTS, OFFS, v), f"grouped_mm: {CONFIG}", NONE),
    ],
    "register_experts": [
        Call(
            f.register_experts, r"experts_type must be a subclass of nn\.Module, got", ("a class",)
        ),
        Call(
            lambda v: f.register_experts(type("Own", (nn.Module,), {}), v),
            "register_experts: forward must be callable, got ",
            (*NONE, "a class"),
        ),
    ],
    "Float8ExpertParallel": [
        Call(lambda v: f.Float8ExpertParallel(config=v), f"Float8ExpertParallel: {CONFIG}", NONE)
    ],
    "fuse_norms": [
        Call(f.fuse_norms, f"fuse_norms: model {MODULE}"),
        Call(lambda v: f.fuse_norms(model(), v), "pairs must map norms", NONE),
    ],
    "high_precision": [Call(f.high_precision, f"high_precision: model {MODULE}")],
    "inspect": [Call(f.inspect, f"inspect: model {MODULE}")],
    "inspect_every": [
        Call(f.inspect_every, f"inspect_every: model {MODULE}"),
        Call(lambda v: f.inspect_every(converted(), v), "n is an integer >= 1"),
        Call(lambda v: f.inspect_every(converted(), writer=v), "has no add_scalar", NONE),
        Call(
            lambda v: f.inspect_every(converted(), on_alarm=v), "on_alarm must", (*NONE, "a class")
        ),
    ],
    "ms_amp": [
        Call(lambda v: f.ms_amp(v, optimizer(), "O2"), "ms_amp takes"),
        Call(lambda v: f.ms_amp(model(), v, "O2"), "ms_amp takes an AdamW or Adam"),
        Call(ms_amp_level, "unknown level"),
    ],
    "precompute_float8_dynamic_scale_for_fsdp": [
        Call(f.precompute_float8_dynamic_scale_for_fsdp, f"model {MODULE}")
    ],
    "ScalingType": [Call(f.ScalingType, "is not a valid ScalingType")],
    "saved_activations": [
        Call(f.saved_activations, f"model {MODULE}", NONE),
        Call(lambda v: f.saved_activations(fmt=v), "is not a float8 format"),
        Call(lambda v: f.saved_activations(group=v), "group="),
        Call(lambda v: f.saved_activations(skip=v), "skip"),
        Call(lambda v: f.saved_activations(also=v), "also"),
        Call(lambda v: f.saved_activations(min_size=v), "min_size"),
        Call(lambda v: f.saved_activations(power_of_two_scale=v), "must be True or False"),
    ],
    "sync_float8_amax_and_scale_history": [
        Call(f.sync_float8_amax_and_scale_history, f"model {MODULE}"),
        Call(
            lambda v: f.sync_float8_amax_and_scale_history(converted(), v),
            "group must be a ProcessGroup",
            NONE,
        ),
    ],
    "after_step": [
        Call(f.after_step, f"after_step: model {MODULE}"),
        Call(lambda v: f.after_step(converted(), v), "group must be a ProcessGroup", NONE),
    ],
    # float8.checkpoints
    "load": [
        Call(lambda v: checkpoints.load(v, "folder"), MODULE),
        Call(lambda v: checkpoints.load(model(), v), "path must be", ("a string",)),
        Call(lambda v: checkpoints.load(model(), "folder", v), "weights must be one of"),
        Call(lambda v: checkpoints.load(model(), "folder", "training", config=v), CONFIG, NONE),
        Call(lambda v: checkpoints.load(model(), "folder", ignore=v), "ignore must be a list"),
        Call(lambda v: checkpoints.load(model(), "folder", device=v), "device must be"),
    ],
    "plan_save": save_arguments("plan_save"),
    "save_pretrained": [
        *save_arguments("save_pretrained", NOWHERE),
        Call(lambda v: checkpoints.save_pretrained(converted(), v), "folder must be a path", PATH),
        *(
            Call(
                lambda v, n=n: checkpoints.save_pretrained(converted(), NOWHERE, **{n: v}),
                f"{n} must be True or False",
            )
            for n in ("overwrite", "progress")
        ),
    ],
    "weight_updates": [
        Call(checkpoints.weight_updates, MODULE),
        Call(lambda v: checkpoints.weight_updates(converted(), v), "layout", NONE),
        Call(
            lambda v: checkpoints.weight_updates(converted(), input_scales=v),
            "input_scales must be a mapping",
            NONE,
        ),
        Call(lambda v: checkpoints.weight_updates(converted(), recast=v), "must be True or False"),
    ],
    # float8.config
    "check_config": [Call(f.config.check_config, CONFIG)],
    # float8.distributed.gradients
    "float8_gradients": [
        Call(f.distributed.gradients.float8_gradients, "reduces no gradients|must be an nn.Module")
    ],
    # float8.filters
    "skip_names": [Call(filters.skip_names, "skip_names takes strings", ("a string",))],
    "min_size": [Call(filters.min_size, "weight_elements must be an integer >= 0")],
    "min_features": [
        Call(filters.min_features, "in_features must be an integer >= 0"),
        Call(lambda v: filters.min_features(0, v), "out_features must be an integer >= 0"),
    ],
    "divisible_by": [Call(filters.divisible_by, "multiple must be an integer >= 1")],
    "all_of": [Call(filters.all_of, "all_of takes filters")],
    # float8.numerics
    "load_run": [Call(f.numerics.load_run, "", ("a string",))],  # a path
    "load_alarms": [Call(f.numerics.load_alarms, "", ("a string",))],  # a path
    # float8.optim
    "AdamW": OPTIMIZER[:1],
    "Adam": OPTIMIZER[1:2],
    "SGD": OPTIMIZER[2:3],
    "Lion": OPTIMIZER[3:],
    "float32_state_dict": [
        Call(f.optim.float32_state_dict, "must be an optimizer of", ("an optimizer",))
    ],
    "report": [Call(f.optim.report, "must be an optimizer of float8.optim")],
}

# Not functions that a user calls with values of their own: results, and rows of tables that other
# functions make; and torch's own parallel styles, whose arguments torch checks.
NO_CALLS = {
    *("Calibration", "CastStatistics", "Comparison", "Device", "Estimate", "Figure"),
    *("Finding", "ModuleFilter", "SavePlan"),
    "ScaleFormat",
    *("Float8Gradients", "Gemm", "GradientReport", "LinearPlan", "Moment", "Monitor", "Alarm"),
    *("GemmSpeed", "OperandCast", "Report", "ScalingController", "StateReport"),
    *("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"),
    *("ModelOpt", "Rowwise", "Tensorwise"),  # which take none
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


def outcome(call: Call, bad: object) -> str:
    """The reason why a call's answer to a bad value is wrong, or None."""
    try:
        result = call.run(bad)
        if isinstance(result, AbstractContextManager) and not isinstance(result, nn.Module):
            with result:
                pass
    except (TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        is_raw = "object has no attribute" in said
        return said if is_raw or not re.search(call.says, str(error)) else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "was accepted"


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name]])
def test_a_bad_argument_is_refused_in_words(name):
    wrong = [
        f"{name}, call {number}, {kind}: {found}"
        for number, call in enumerate(CALLS[name])
        for kind, make in BAD.items()
        if kind not in call.takes and (found := outcome(call, make()))
    ]
    assert wrong == []


# --- the checks themselves


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (True, "True"),
        ("x", "'x'"),
        ("x" * 80, "'" + "x" * 57 + "...'"),
        ([1], "a list"),
        (nn.Linear, "the class Linear"),
        (nn.Embedding(1, 1), "an Embedding"),
        (torch.float16, "torch.float16"),
    ],
)
def test_a_value_is_described_in_a_few_words(value, words):
    assert described(value) == words


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        (torch.optim.SGD([torch.ones(1)]), "give the model whose parameters it steps"),
        (nn.Linear, r"give an instance, such as Linear\(\.\.\.\)"),
        ([nn.Linear(1, 1)], r"nn\.ModuleList\(\.\.\.\) of them"),
        ({"a": nn.Linear(1, 1)}, r"nn\.ModuleDict\(\.\.\.\) of them"),
        (None, "got None$"),
    ],
)
def test_the_message_says_what_to_give_in_place_of_no_module(value, way_out):
    with pytest.raises(TypeError, match=way_out):
        check_module(value, "f")


def test_good_values_pass():
    check_module(nn.Identity(), "f")
    check_tensors("f", x=torch.ones(1), p=nn.Parameter(torch.ones(1)))
    check_integer(3, "n", 3)
    with pytest.raises(ValueError, match="n must be an integer >= 3, got 2"):
        check_integer(2, "n", 3)


def test_a_config_may_be_the_name_of_a_recipe():
    row = f.config.RECIPES["rowwise"]
    for layer in (
        Float8Linear(32, 16, config="rowwise"),
        Float8Linear.from_float(nn.Linear(32, 16), "rowwise"),
        float8.convert_to_float8_training(nn.Linear(32, 16), config="rowwise"),
        float8.convert_to_float8_inference(nn.Linear(32, 16), config="rowwise"),
    ):
        assert layer.config == row
    assert torch.equal(f.float8_linear(X, W, None, "rowwise"), f.float8_linear(X, W, None, row))
    by_name = f.grouped_mm(X, EXPERTS, OFFS, "rowwise")
    assert torch.equal(by_name, f.grouped_mm(X, EXPERTS, OFFS, row))
    with pytest.raises(ValueError, match=r"float8_linear: unknown recipe 'rowwize'.*did you mean"):
        f.float8_linear(X, W, None, "rowwize")


# --- the package's names


def test_dir_has_the_lazy_names_and_not_what_the_package_imports():
    names = set(dir(float8))
    assert {"ms_amp", "inspect", "optim", "numerics", "unit_scaling"} < names
    assert set(float8.__all__) < names
    assert not {"Any", "importlib", "refuse_name"} & names


def test_a_star_import_hides_no_module_of_python():
    assert set(float8.__all__) & sys.stdlib_module_names == set()
    names: dict[str, object] = {"inspect": inspect}
    exec("from float8 import *", names)
    assert names["inspect"] is inspect
    assert callable(float8.inspect)
