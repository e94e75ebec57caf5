"""``torch.compile``: one graph forward and backward, the bits of eager, and no recompilation.

The bit-for-bit comparison holds for casts and scales by definition; it holds for layers here
because both run the same GEMM on the CPU. Inductor may fuse a layer's cast with what computes its
input; it then has eager's bits where it rounds as eager does (``emulate_precision_casts``).
"""

import ast
import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from assertions import assert_all_bitwise, assert_bitwise
from fresh import ROOT
from layer_check import EMULATED
from meter import GemmCounter, saved_bytes
from recompute import keep_products
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from float8 import (
    E4M3,
    Blockwise,
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    cached_weights,
    convert_to_float8_training,
    float8_linear,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

whole = partial(checkpoint, use_reentrant=False)
selectively = partial(
    whole, context_fn=partial(create_selective_checkpoint_contexts, keep_products)
)
# Files of which dynamo traces some function.
TRACED = {
    ".": ("granularity",),
    "activations": ("*",),
    "distributed": ("sync",),
    "experts": ("grouped_mm",),
    "fusion": ("norm_autograd", "feed_forward_autograd"),
    "kernels": (
        *("cublas", "definition", "grouped_products", "moments", "optimizer_step", "products"),
    ),
    "linear": (
        *("autograd", "casts", "float8_weight", "layer", "module", "plan", "refusals"),
        "smoothing",
    ),
    "optim": ("moment",),
    "unit_scaling": ("constraints", "registry", "functional/*", "modules/*"),
    "unit_scaling/transforms": ("unit_scale",),
}
REGIONS = {"none": lambda model, x: model(x), "whole": whole, "selective": selectively}


def model_of(recipe, k, n):
    """A layer between others: what can go wrong in tracing does so in one."""
    model = nn.Sequential(nn.RMSNorm(k), nn.Linear(k, n), nn.SiLU()).bfloat16()
    known = RECIPES | EMULATED
    config = replace(known[recipe], pad_inner_dim=True)  # converts all sizes
    return convert_to_float8_training(model, config=config)


def step(model, run, x, g):
    x = x.detach().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", g.dtype, enabled=g.dtype != x.dtype):
        out = run(x)
    out.backward(g)
    sync_float8_amax_and_scale_history(model)
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_bits_of_eager(model, x, g, backend="aot_eager", region="none", replay=""):
    """Of two steps with rows as loud and as quiet as each other's bits can tell."""
    compiled = copy.deepcopy(model)
    run = torch.compile(partial(REGIONS[region], compiled), backend=backend, fullgraph=True)
    loudness = torch.exp2(torch.arange(len(x)) % 17 - 8.0)[:, None]
    for factor in (1, loudness):
        inputs = (x * factor).to(x.dtype)
        expected = step(model, model, inputs, g)
        assert all(tensor.isfinite().all() for tensor in expected)
        assert_all_bitwise(step(compiled, run, inputs, g), expected, replay)
    assert_all_bitwise(compiled.buffers(), model.buffers(), replay)  # delayed scaling's state


@pytest.mark.slow
def test_layers_compiled_by_inductor_have_the_bits_of_eager():
    model = nn.Sequential(*(Float8Linear(64, 64, config="tensorwise") for _ in range(2)))
    x, g = torch.randn(2, 32, 64).bfloat16()
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert_bits_of_eager(model.bfloat16(), x, g, "inductor")


RECOMPUTED = "tensorwise", "delayed", "rowwise_with_gw_hp", "mxfp8"  # others: marked slow


@pytest.mark.parametrize(
    ("recipe", "region"),
    [
        pytest.param(
            *(recipe, region),
            marks=pytest.mark.slow if region != "none" and recipe not in RECOMPUTED else (),
        )
        for recipe in (*RECIPES, *EMULATED)
        for region in REGIONS
    ],
)
def test_a_layer_compiles_to_one_graph_with_the_bits_of_eager(recipe, region):
    """Recomputed too, where other bits have been NaN: torchtitan#1056, #865."""
    size = (130, 250, 131) if region == "none" else (32, 64, 48)
    m, k, n = size
    model = model_of(recipe, k, n)
    backend = "aot_eager_decomp_partition" if region == "selective" else "aot_eager"
    x, g = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
    assert_bits_of_eager(model, x, g, backend, region, (recipe, region, size))


@pytest.mark.parametrize("recipe", RECIPES)
def test_selective_checkpointing_multiplies_nothing_twice(recipe):
    """Three products a layer and step; full checkpointing repeats those that others read."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3)), nn.SiLU())
    convert_to_float8_training(model, config=RECIPES[recipe])
    x, g = torch.randn(2, 32, 64).bfloat16()
    plain, products = copy.deepcopy(model), {}
    expected = step(plain, plain, x, g)
    for name, region in REGIONS.items():
        twin = copy.deepcopy(model)
        with GemmCounter() as counter:
            assert_all_bitwise(step(twin, partial(region, twin), x, g), expected, (recipe, name))
        products[name] = counter.products
    assert products == {"none": 9, "whole": 9 + 3, "selective": 9}


def keep_all(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("policy", [pytest.param(keep_products, marks=pytest.mark.slow), keep_all])
def test_amaxes_are_recorded_where_checkpointing_keeps_results(policy):
    """What is saved is not what a compiled delayed layer writes its amaxes to."""
    model = nn.Sequential(*(Float8Linear(64, 64, config="delayed") for _ in range(2))).bfloat16()
    compiled = copy.deepcopy(model)
    region = partial(whole, context_fn=partial(create_selective_checkpoint_contexts, policy))
    backend = "aot_eager_decomp_partition"
    run = torch.compile(partial(region, compiled), backend=backend, fullgraph=True)
    for _ in range(3):  # the first step is dynamic
        x, g = torch.randn(2, 32, 64).bfloat16()
        assert_all_bitwise(step(compiled, run, x, g), step(model, model, x, g))
    assert_all_bitwise(compiled.buffers(), model.buffers())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "unit"])
def test_a_compiled_layer_saves_its_input_in_float8_and_no_weight(recipe):
    # By the partitioner that inductor uses. Half of nn.Linear's bytes, and scales.
    layer = Float8Linear(256, 128, dtype=torch.bfloat16, config=RECIPES[recipe])
    run = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(lambda: run(x), layer) <= 0.55 * x.nbytes


@pytest.mark.parametrize(
    ("recipe", "dynamic", "sizes", "graphs"),
    [
        # No whole blocks of 32, whose graph is another one. Delayed: the dynamic first step is a
        # graph of its own.
        *((recipe, True, (48, 48, 80, 33), 1) for recipe in ("rowwise", "mxfp8")),
        ("delayed", True, (48, 48, 80, 33), 2),
        ("tensorwise", None, (32, 48, 80, 112), 2),  # the second batch size is the last to compile
    ],
)
def test_steps_and_batch_sizes_do_not_recompile(recipe, dynamic, sizes, graphs):
    model = nn.Sequential(Float8Linear(64, 48, config=RECIPES[recipe]), nn.ReLU())
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for batch in sizes:
        step(model, run, torch.randn(batch, 64), torch.randn(batch, 48))
        counts.append(counter.frame_count)
    # (Not the number itself: torch 2.11 may show its backend a graph twice.)
    assert counts[-1] == counts[graphs - 1]


@pytest.mark.parametrize("context", [nullcontext, cached_weights])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_equal_blocks_that_are_compiled_one_by_one_share_a_graph(recipe, context):
    """Also those of a cache; dynamo compiles a function 8 times, and then runs it eager."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(3)))
    convert_to_float8_training(blocks, config=recipe)
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    x = torch.randn(32, 64, requires_grad=True)
    with context(blocks):
        for block in blocks:
            block.compile(backend=counter, fullgraph=True, dynamic=False)
            x = block(x)
            counts.append(counter.frame_count)
    assert counts == [counts[0]] * 3


# Scales of any value: a factor that is no power of two shows where operands lose bits.
UNDER_AUTOCAST = {
    **{name: RECIPES[name] for name in ("tensorwise", "delayed", "rowwise_with_gw_hp")},
    "blockwise": Float8LinearConfig(
        CastConfig(granularity=Blockwise(1, 128)),
        CastConfig(granularity=Blockwise(128, 128)),
        CastConfig(granularity=Blockwise(1, 128), target_dtype=E4M3.dtype),
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype", "region"),
    [
        *((name, torch.bfloat16, "none") for name in UNDER_AUTOCAST),
        pytest.param("tensorwise", torch.float16, "none", marks=pytest.mark.slow),
        ("tensorwise", torch.float16, "whole"),
    ],
)
def test_autocast_compiles(name, dtype, region):
    """AOTAutograd traces the backward under autocast; products in float16 would overflow."""
    layer = Float8Linear(64, 48, config=UNDER_AUTOCAST[name])
    x, g = torch.randn(32, 64), torch.randn(32, 48).to(dtype)
    assert_bits_of_eager(layer, x, g, region=region, replay=(name, dtype))
    if region == "none":
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
        with torch.inference_mode(), torch.autocast("cpu", dtype):
            assert_bitwise(run(x), layer(x), name)


def test_the_functional_form_and_its_float8_inputs_compile():
    x, w, g = torch.randn(32, 64, requires_grad=True), torch.randn(48, 64), torch.randn(32, 48)

    def functions(x):
        return float8_linear(x, w), float8_linear(Float8Tensor.from_high_precision(x, E4M3), w)

    run = torch.compile(functions, backend="aot_eager", fullgraph=True)
    for found, expected in zip(run(x), functions(x), strict=True):
        assert_bitwise(found, expected)
        grads = (torch.autograd.grad(out, x, g, retain_graph=True) for out in (found, expected))
        assert_bitwise(*(grad for (grad,) in grads))


@pytest.mark.parametrize(("folder", "names"), TRACED.items())
def test_what_dynamo_traces_has_no_generator_expression(folder, names):
    """Dynamo of torch 2.14 raises "generator already executing" for some; it takes any list."""
    for name in names:
        files = list((ROOT / "float8" / folder).glob(f"{name}.py"))
        assert files, name
        for path in files:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            lines = [node.lineno for node in nodes if isinstance(node, ast.GeneratorExp)]
            assert not lines, f"{path}, lines {lines}: write a list in place of each generator"
