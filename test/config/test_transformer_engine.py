"""Every argument of a TransformerEngine recipe arrives, in each spelling, or is refused by name."""

import enum
import inspect
import sys
import typing
from dataclasses import fields
from itertools import product

import pytest
from fresh import facts_of
from plans import cast, casts_of

from float8.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from float8.formats import E4M3, E5M2

TENSOR, DELAYED = (-1, -1), ScalingType.DELAYED
te = Float8LinearConfig.from_te_recipe


def history(**others) -> DelayedScalingConfig:
    return DelayedScalingConfig(**{"history_len": 1024, "remember_nonfinite": True, **others})


class Format(enum.Enum):
    """As TransformerEngine's: members whose values are not their names."""

    E4M3 = (448, 448)
    HYBRID = (448, 57344)


def test_the_defaults_are_those_of_delayed_scaling():
    config = te()
    assert config.operand_casts == (CastConfig(DELAYED),) * 3
    assert config.delayed_scaling == history()
    assert config.enable_amax_init is False
    fast = (config.plan.output, config.plan.grad_input, config.plan.grad_weight)
    assert [gemm.use_fast_accum for gemm in fast] == [True, False, False]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is new in 3.11")
def test_an_editor_is_shown_the_arguments_and_their_defaults():
    shown = inspect.signature(typing.get_overloads(te)[0].__func__).parameters.values()
    defaults = {p.name: p.default for p in shown if p.kind is p.KEYWORD_ONLY}
    assert set(defaults) == {
        "margin",
        "interval",
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
    }
    assert te(**defaults) == te()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"margin": 2}, {"margin": 2}),
        ({"margin": -3}, {"margin": -3}),
        ({"interval": 16}, {"interval": 16}),
        ({"interval": -1}, {}),  # how it says that it is not set
        ({"amax_history_len": 7}, {"history_len": 7}),
        ({"amax_compute_algo": "most_recent"}, {"amax_compute_algo": "most_recent"}),
        ({"amax_compute_algo": "MAX"}, {}),
        ({"reduce_amax": True, "fp8_dpa": False, "fp8_mha": False}, {}),
        ({"scaling_factor_compute_algo": None, "backward_override": None}, {}),
    ],
)
def test_each_argument_of_the_history_arrives(arguments, expected):
    assert te(**arguments).delayed_scaling == history(**expected)
    assert te(arguments) == te(**arguments)


@pytest.mark.parametrize("fmt", ["HYBRID", "hybrid", Format.HYBRID, "E4M3", "e4m3", Format.E4M3])
def test_the_format_is_that_of_grad_output(fmt):
    grad = E4M3 if "e4m3" in str(fmt).lower() else E5M2
    d4, dg = cast(TENSOR, scaling=DELAYED), cast(TENSOR, grad, DELAYED)
    assert casts_of(te(fp8_format=fmt).plan) == [d4, d4, dg, d4, dg, d4]


@pytest.mark.parametrize("override", list(product([False, True], repeat=3)), ids=str)
def test_each_gemm_runs_in_high_precision_where_that_is_asked_for(override):
    for spelling in (override, list(override)):
        plan = te(override_linear_precision=spelling).plan
        gemms = (plan.output, plan.grad_input, plan.grad_weight)
        assert tuple(gemm.a is None and gemm.b is None for gemm in gemms) == override
        assert all(c.scaling_type is DELAYED for c in casts_of(plan) if c is not None)


def test_a_backward_in_high_precision_is_two_overrides():
    spelt = te(override_linear_precision=(False, True, True))
    assert te(backward_override="high_precision") == spelt


# --- spellings


# What `accelerate config` writes, and the same in upper case.
ACCELERATE = {
    "backend": "TE",
    "use_autocast_during_eval": True,
    "margin": 1,
    "interval": 4,
    "fp8_format": "E4M3",
    "amax_history_length": 32,
    "amax_compute_algorithm": "most_recent",
    "override_linear_precision": [False, False, True],
}


@pytest.mark.parametrize("prefix", ["", "fp8_"])  # as files may write and arguments are called
@pytest.mark.parametrize("upper", [False, True])
def test_the_block_of_an_accelerate_file_is_understood(upper, prefix):
    block = {prefix + key.removeprefix(prefix): value for key, value in ACCELERATE.items()}
    block = {key.upper() if upper else key: value for key, value in block.items()}
    expected = te(
        margin=1,
        interval=4,
        fp8_format="E4M3",
        amax_history_len=32,
        amax_compute_algo="most_recent",
        override_linear_precision=(False, False, True),
    )
    assert te(block) == te(**block) == expected


def test_accelerates_own_object_is_understood():
    """Every field of the installed one, filled in: to make it asks for TransformerEngine."""
    accelerate = pytest.importorskip("accelerate.utils.dataclasses")
    kwargs = object.__new__(accelerate.TERecipeKwargs)
    values = {**ACCELERATE, "amax_history_len": 32, "amax_compute_algo": "most_recent"}
    for each in fields(kwargs):
        setattr(kwargs, each.name, values.get(each.name, False))
    block = {name: value for name, value in ACCELERATE.items() if name != "backend"}
    assert te(kwargs) == te(block)


def test_an_override_that_is_switched_off_is_none():
    assert te({"override_linear_precision": False}) == te()


def test_a_mapping_and_keywords_add_up():
    assert te({"margin": 1}, interval=3) == te(margin=1, interval=3)


def test_evaluation_in_high_precision_is_told_how():
    with pytest.warns(UserWarning, match=r"float8\.high_precision\(model\)") as caught:
        te({"use_autocast_during_eval": False})
    assert caught[0].filename == __file__


# --- what is refused

REFUSED = {
    "a near miss": ({"amax_history": 3}, TypeError, "did you mean 'amax_history_len'?"),
    "an unknown one": ({"zzz": 3}, TypeError, "unknown argument 'zzz'.*known: margin, interval"),
    "e5m2": ({"fp8_format": "E5M2"}, ValueError, "no hardware multiplies E5M2 by E5M2"),
    "another format": ({"fp8_format": "hybird"}, ValueError, "did you mean 'HYBRID'"),
    "a number as format": ({"fp8_format": 8}, ValueError, "'HYBRID' or 'E4M3': got 8"),
    "a function": ({"amax_compute_algo": max}, ValueError, "a function is not supported"),
    "another algo": ({"amax_compute_algo": "mean"}, ValueError, "'most_recent'; got 'mean'"),
    "own scales": (
        {"scaling_factor_compute_algo": max},
        ValueError,
        "scaling_factor_compute_algo=.*documented formula only",
    ),
    "local amaxes": ({"reduce_amax": False}, ValueError, "reduce_amax=False: .* process group"),
    "attention": ({"fp8_dpa": True}, ValueError, "fp8_dpa=True: attention"),
    "more attention": ({"fp8_mha": True}, ValueError, "fp8_mha=True: attention"),
    "dequantised": (
        {"backward_override": "dequantized"},
        ValueError,
        "backward_override='dequantized'",
    ),
    "mx": ({"use_mxfp8_block_scaling": True}, ValueError, "a scale per 32 elements"),
    "torchao": (
        {"backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True},
        ValueError,
        "fields of Float8LinearConfig, and a config of torchao is for .*from_torchao",
    ),
    "ms-amp": (
        {"backend": "msamp", "optimization_level": "O2"},
        ValueError,
        r"use float8\.ms_amp",
    ),
    "text as a number": ({"margin": "1"}, TypeError, "margin must be an integer, got '1'"),
    "a truth as a number": ({"interval": True}, TypeError, "interval must be an integer"),
    "no interval": ({"interval": 0}, ValueError, "interval must be an integer >= 1, got 0"),
    "a margin beyond all": ({"margin": 40}, ValueError, "margin .* within 32 of 0, got 40"),
    "one override": ({"override_linear_precision": True}, TypeError, "fprop, dgrad, wgrad"),
    "two overrides": ({"override_linear_precision": (True, False)}, TypeError, "three booleans"),
    "numbers": ({"override_linear_precision": (1, 0, 0)}, TypeError, "three booleans"),
    "twice": (
        {"amax_history_len": 3, "AMAX_HISTORY_LENGTH": 4},
        ValueError,
        "given twice: as 'amax_history_len' and as 'AMAX_HISTORY_LENGTH'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_here_is_refused_by_name(case):
    arguments, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        te(**arguments)
    with pytest.raises(error, match=message):
        te(arguments)


def test_bad_numbers_are_refused_where_no_gemm_is_left_to_use_them_too():
    with pytest.raises(ValueError, match="interval"):
        te(interval=0, override_linear_precision=(True, True, True))


def test_an_argument_in_a_mapping_and_beside_it_is_refused():
    with pytest.raises(ValueError, match=r"margin is given twice: 1 in .* and 2 beside it"):
        te({"margin": 1}, margin=2)


def test_neither_transformer_engine_nor_torchao_is_imported():
    facts = facts_of(
        "import sys\n"
        "import float8\n"
        "float8.Float8LinearConfig.from_te_recipe(interval=2)\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "facts['found'] = sorted(roots & {'torchao', 'transformer_engine', 'accelerate'})\n"
    )
    assert facts["found"] == []
