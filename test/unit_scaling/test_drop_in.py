"""A call that was written for the package ``unit-scaling`` (0.3.5) binds to this one.

``CALLS`` are the signatures of its public functions and classes. What differs on purpose is in
docs/migrating/unit_scaling.md.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
from fresh import facts_of

import float8.unit_scaling as uu
from float8.unit_scaling.utils import analyse_module

CALLS = """
Conv1d(in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1,
    bias=False, padding_mode='zeros', device=None, dtype=None, constraint='to_output_scale',
    weight_mup_type='weight')
CrossEntropyLoss(mult=1.0, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction='mean', label_smoothing=0.0)
DepthModuleList(modules)
DepthSequential(*args)
Dropout(p=0.5, inplace=False)
Embedding(num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0,
    scale_grad_by_freq=False, sparse=False, _weight=None, _freeze=False, device=None, dtype=None)
GELU(mult=1.0, constraint='to_output_scale', approximate='none')
LayerNorm(normalized_shape, eps=1e-05, elementwise_affine=False, bias=True, device=None, dtype=None)
Linear(in_features, out_features, bias=False, device=None, dtype=None, constraint='to_output_scale',
    weight_mup_type='weight')
LinearReadout(in_features, out_features, bias=False, device=None, dtype=None, constraint=None,
    weight_mup_type='output')
MHSA(hidden_size, heads, is_causal, dropout_p=0.0, mult=1.0)
MLP(hidden_size, expansion_factor=4)
RMSNorm(normalized_shape, eps=1e-05, elementwise_affine=False)
SiLU(mult=1.0, constraint='to_output_scale', inplace=False)
Softmax(dim, mult=1.0, constraint='to_output_scale')
TransformerDecoder(hidden_size, vocab_size, layers, heads, dropout_p=0.0, residual_scaling=...)
TransformerLayer(hidden_size, heads, mhsa_tau, mlp_tau, is_causal, dropout_p=0.0)
functional.add(input, other, constraint='to_output_scale', alpha=1, out=None)
functional.conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1,
    constraint='to_output_scale', scale_power=(0.5, 0.5, 0.5))
functional.cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100,
    reduce=None, reduction='mean', label_smoothing=0.0, mult=1.0)
functional.dropout(input, p=0.5, training=True, inplace=False)
functional.embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0,
    scale_grad_by_freq=False, sparse=False)
functional.gelu(input, mult=1.0, constraint='to_output_scale', approximate='none')
functional.layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05)
functional.linear(input, weight, bias, constraint='to_output_scale', scale_power=(0.5, 0.5, 0.5))
functional.linear_readout(input, weight, bias, constraint=None)
functional.matmul(left, right, constraint='to_output_scale')
functional.mse_loss(input, target, size_average=None, reduce=None, reduction='mean')
functional.residual_add(residual, skip, tau=1.0)
functional.residual_apply(fn, input, tau=1.0)
functional.residual_split(input, tau=1.0)
functional.rms_norm(input, normalized_shape, weight=None, eps=1e-05)
functional.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0,
    is_causal=False, mult=1.0)
functional.silu(input, mult=1.0, constraint='to_output_scale', inplace=False)
functional.silu_glu(input, gate, mult=1.0)
functional.softmax(input, dim, dtype=None, constraint='to_output_scale', mult=1.0)
core.functional.logarithmic_interpolation(alpha, lower, upper)
core.functional.rms(x, dims=None, keepdim=False, eps=0.0)
core.functional.scale_elementwise(f, output_scale, grad_input_scale, constraint='to_output_scale')
core.functional.transformer_residual_scaling_rule(residual_mult=1.0, residual_attn_ratio=1.0)
constraints.amean(*scales)
constraints.apply_constraint(constraint_name, *scales)
constraints.gmean(*scales)
constraints.hmean(*scales)
constraints.to_grad_input_scale(output_scale, grad_input_scale)
constraints.to_left_grad_scale(output_scale, left_grad_scale, right_grad_scale)
constraints.to_output_scale(output_scale, *grad_input_scale)
constraints.to_right_grad_scale(output_scale, left_grad_scale, right_grad_scale)
formats.FPFormat(exponent_bits, mantissa_bits, rounding='stochastic', srbits=0)
formats.format_to_tuple(format)
formats.tuple_to_format(t)
scale.scale_bwd(input, scale)
scale.scale_fwd(input, scale)
optim.Adam(params, lr=0.001, *args, weight_decay=0, independent_weight_decay=True,
    allow_non_unit_scaling_params=False, **kwargs)
optim.AdamW(params, lr=0.001, *args, weight_decay=0, independent_weight_decay=True,
    allow_non_unit_scaling_params=False, **kwargs)
optim.SGD(params, lr=0.001, *args, weight_decay=0, independent_weight_decay=True,
    allow_non_unit_scaling_params=False, readout_constraint=None, **kwargs)
optim.lr_scale_for_depth(param)
optim.lr_scale_func_adam(param)
optim.lr_scale_func_sgd(readout_constraint)
optim.scaled_parameters(params, lr_scale_func, lr=None, weight_decay=0,
    independent_weight_decay=True, allow_non_unit_scaling_params=False)
parameter.Parameter(data, mup_type, mup_scaling_depth=None)
parameter.has_parameter_data(parameter)
transforms.Metrics(fwd_tensor)
transforms.compile(module)
transforms.prune_non_float_tensors(graph)
transforms.prune_same_scale_tensors(graph, rtol=2**-16)
transforms.prune_selected_nodes(graph, targets)
transforms.simulate_format(module, fwd_format, bwd_format)
transforms.simulate_fp8(module)
transforms.track_scales(module)
transforms.unit_scale(module, replace=...)
analysis.graph_to_dataframe(g)
analysis.plot(g, title='', metric='mean_abs', prune_same_scale=True, show_arrows=True,
    show_error_bars=True)
"""
# Public names that are not functions, or whose arguments differ on purpose.
NAMES = [
    *("MupType", "Parameter", "__version__", "core", "functional", "optim", "parameter"),
    *("transformer_residual_scaling_rule", "functional.torch_map"),
    "core.functional.ResidualScalingFn",
    *("parameter.MupType", "parameter.ParameterData"),
    "utils.analyse_module",
]


def signatures() -> dict[str, inspect.Signature]:
    calls = re.findall(r"^(\S+)\((.*)\)$", re.sub(r"\n +", " ", CALLS), flags=re.MULTILINE)
    scope: dict[str, Any] = {}
    found = {}
    for name, arguments in calls:
        exec(f"def function({arguments}): pass", scope)
        found[name] = inspect.signature(scope["function"])
    return found


SIGNATURES = signatures()


def named(root: Any, name: str) -> Any:
    """``a.b.c`` of a package: c of its module a.b."""
    module, _, attribute = name.rpartition(".")
    module = importlib.import_module(f"{root.__name__}.{module}") if module else root
    return getattr(module, attribute)


def same_default(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    # ... is a default that has no short name: an empty dict, or the rule that None means here.
    return theirs.default in (inspect.Parameter.empty, ...) or theirs.default == ours.default


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_same_names_order_and_defaults(name):
    theirs = list(SIGNATURES[name].parameters.values())
    ours = list(inspect.signature(named(uu, name)).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.kind for p in ours[: len(theirs)]] == [p.kind for p in theirs]
    assert all(map(same_default, theirs, ours)), (name, ours)
    more = ours[len(theirs) :]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in more), (name, more)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_there(name):
    assert named(uu, name) is not None


# --- importing

PROGRAM = """
import importlib, sys, time, float8
before, begin = set(sys.modules), time.process_time()
import float8.unit_scaling
facts["seconds"] = time.process_time() - begin
facts["loaded"] = sorted(set(sys.modules) - before)
"""


@pytest.fixture(scope="module")
def fresh():
    return facts_of(PROGRAM)


def test_importing_is_quick_and_loads_no_compiler_and_no_plots(fresh):
    heavy = ("triton", "torch._dynamo", "torch._inductor", "matplotlib", "pandas", "einops")
    assert [name for name in fresh["loaded"] if name.startswith(heavy)] == []
    took = fresh["seconds"]
    assert took < 0.3, f"import float8.unit_scaling takes {took:.2f} s more than import float8"


def test_one_function_has_the_names_of_both_packages():
    assert analyse_module is uu.utils.analyse_module is uu.analysis.analyse_module
