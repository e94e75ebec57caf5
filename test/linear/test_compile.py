"""``torch.compile``: one graph forward and backward, the bits of eager, and no recompilation.

The bit-for-bit comparison holds for casts and scales by definition; it holds for one layer here
because both run the same GEMM on the CPU. Inductor may fuse a layer's cast with what computes its
input, and then only the accuracy is eager's.
"""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from float8 import (
    Float8Linear,
    ScaleFormat,
    convert_to_float8_training,
    float8_linear,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.kernels import cpu


def _layer(recipe):
    """A layer and something behind it: what can go wrong in tracing does so in one."""
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
    return convert_to_float8_training(model, config=RECIPES[recipe])


def _step(model, run, x, g):
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = run(x)
    out.backward(g)
    sync_float8_amax_and_scale_history(model)
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def _assert_bits_of_eager(recipe, size, backend):
    m, k, n = size
    eager = Float8Linear(k, n, dtype=torch.bfloat16, config=RECIPES[recipe])
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, backend=backend, fullgraph=True)
    for step in range(2):
        x, g = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
        for a, b in zip(_step(compiled, run, x, g), _step(eager, eager, x, g), strict=True):
            assert_bitwise(a, b, f"{recipe}, {size}, step {step}")
        for a, b in zip(compiled.buffers(), eager.buffers(), strict=True):
            assert_bitwise(a, b, "delayed scaling's state")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise", "mxfp8", "unit"])
def test_a_layer_compiles_to_one_graph_with_the_bits_of_eager(recipe):
    # By inductor, once for each kind of cast: the first step of delayed scaling casts as tensorwise
    # does. Of aot_eager the test of checkpointing claims the same of every recipe. Blocks of 128
    # divide one of three sizes, so that there are kernels with padding and kernels without.
    size = (130, 256, 131) if recipe == "blockwise" else (32, 64, 48)
    _assert_bits_of_eager(recipe, size, "inductor")


@pytest.mark.parametrize("size", [(256, 256, 512), (130, 250, 131)])
def test_blocks_compile_whether_they_divide_or_not(size):
    _assert_bits_of_eager("blockwise", size, "aot_eager")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "unit"])
def test_a_compiled_layer_saves_its_input_in_float8_and_no_weight(recipe):
    # By the partitioner that inductor uses. Half of nn.Linear's bytes, and scales.
    layer = Float8Linear(256, 128, dtype=torch.bfloat16, config=RECIPES[recipe])
    run = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        out = run(x)
    kept.pop(layer.weight.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) <= 0.55 * x.nbytes
    out.backward(torch.ones_like(out))
    assert x.grad is not None


# One for each way in which a compiled layer casts; the others are made of these.
FUSED = ("tensorwise", "rowwise", "blockwise", "unit")


class Chains(nn.Module):
    """Two chained layers of each recipe: the second cast may be fused with the first product."""

    def __init__(self):
        super().__init__()
        self.chains = nn.ModuleList(
            nn.Sequential(*(Float8Linear(64, 64, config=RECIPES[name]) for _ in range(2)))
            for name in FUSED
        )

    def forward(self, xs):
        return [chain(x) for chain, x in zip(self.chains, xs, strict=True)]


def _results_of_chains(model, run, xs, gs):
    leaves = [x.clone().requires_grad_() for x in xs]
    out = run(leaves)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, [*leaves, *parameters], list(gs))
    labels = [*(f"{what} {i}" for what in ("out", "dx") for i in range(len(xs))), *names]
    tensors = [t.detach() for t in (*out, *gradients)]
    return dict(zip(labels, tensors, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("emulates", [False, True])
def test_chains_compiled_by_inductor_are_as_accurate_as_eager(emulates):
    # Bits differ: a cast that is fused with its producer reads values that eager rounds first.
    # They are eager's where inductor rounds them too.
    eager = Chains().bfloat16()
    compiled, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    xs, gs = torch.randn(2, len(FUSED), 32, 64).bfloat16()
    with torch._inductor.config.patch(emulate_precision_casts=emulates):
        run = torch.compile(compiled, fullgraph=True)
        found = _results_of_chains(compiled, run, xs, gs)
    plain = _results_of_chains(eager, eager, xs, gs)
    with high_precision(exact):
        wanted = _results_of_chains(exact, exact, xs.double(), gs.double())
    for name, want in wanted.items():
        if emulates:
            assert_bitwise(found[name], plain[name], name)
        else:
            assert_error_within_baseline(found[name], want, plain[name], 2.0, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_and_batch_sizes_do_not_recompile(recipe):
    model = _layer(recipe)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for batch in (48, 48, 80, 112, 33):  # no whole blocks of 32, whose graph is another one
        _step(model, run, torch.randn(batch, 64), torch.randn(batch, 48))
        graphs.append(counter.frame_count)
    # Delayed scaling: the dynamic first step is a graph of its own. (Not 1: torch 2.11 may show its
    # backend a graph twice.)
    assert graphs[-1] == graphs[1 if recipe == "delayed" else 0]


def test_the_second_batch_size_is_the_last_to_compile():
    model = _layer("tensorwise")
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    for batch in (32, 48, 80, 112):
        _step(model, run, torch.randn(batch, 64), torch.randn(batch, 48))
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own look
@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_blocks_compiled_one_by_one_share_graphs(recipe):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    convert_to_float8_training(model, config=RECIPES[recipe])
    counter = CompileCounterWithBackend("eager")  # it is dynamo that shares
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    model(torch.randn(8, 32)).sum().backward()
    assert counter.frame_count <= 2  # the first block's input needs no gradient


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_checkpointing_records_and_computes_as_eager(recipe):
    eager = _layer(recipe)
    compiled = copy.deepcopy(eager)

    def run(x):
        return checkpoint(compiled, x, use_reentrant=False)

    run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x, g = torch.randn(32, 64), torch.randn(32, 48)
        for a, b in zip(_step(compiled, run, x, g), _step(eager, eager, x, g), strict=True):
            assert_bitwise(a, b, recipe)
        for a, b in zip(compiled.buffers(), eager.buffers(), strict=True):
            assert_bitwise(a, b, recipe)


def _keeps_products(ctx, op, *args, **kwargs):
    """Of torch.utils.checkpoint's selective policy: products are kept, all else computed again."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Gated(nn.Module):
    """What a cast may be fused with: a norm before one layer, an activation before the other."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def _selectively(model, x):
    contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise"])
def test_compiled_selective_checkpointing_computes_as_eager(recipe):
    """torchtitan#1056, #865: NaN where casts were computed again from other bits.

    Of loud and quiet rows, which rowwise scales tell apart. Inductor may fuse a cast with what
    comes before it, in the forward or in the backward alone (pytorch#150859); what that may change
    is in test_definition.py: test_an_operand_computed_again_by_other_bits_is_no_nan.
    """
    eager = _Gated().bfloat16()
    convert_to_float8_training(eager, config=RECIPES[recipe])
    compiled = copy.deepcopy(eager)
    backend = "aot_eager_decomp_partition"
    run = torch.compile(partial(_selectively, compiled), backend=backend, fullgraph=True)
    loudness = torch.exp2(torch.arange(32) % 17 - 8.0)[:, None]
    for _ in range(2):
        x, g = (torch.randn(32, 64) * loudness).bfloat16(), torch.randn(32, 64).bfloat16()
        for a, b in zip(_step(compiled, run, x, g), _step(eager, eager, x, g), strict=True):
            assert a.isfinite().all()
            assert_bitwise(a, b, recipe)


# Scales of any value: a factor that is no power of two shows where operands lose bits.
_CASTS = ("cast_config_input", "cast_config_weight", "cast_config_grad_output")
_ANY_SCALES = {
    name: replace(getattr(RECIPES["blockwise"], name), scale_format=ScaleFormat.FLOAT32)
    for name in _CASTS
}
BLOCKWISE_FLOAT32 = replace(RECIPES["blockwise"], **_ANY_SCALES)
UNDER_AUTOCAST = {**RECIPES, "blockwise, float32 scales": BLOCKWISE_FLOAT32}


def _step_under_autocast(layer, run, x, g):
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", g.dtype):
        out = run(leaf)
    out.backward(g)
    return [out.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]


def _both_under_autocast(config, dtype, wrap=lambda layer: layer):
    eager = Float8Linear(64, 48, config=config)
    compiled = copy.deepcopy(eager)
    x, g = torch.randn(32, 64), torch.randn(32, 48).to(dtype)
    run = torch.compile(wrap(compiled), backend="aot_eager", fullgraph=True)
    return _step_under_autocast(compiled, run, x, g), _step_under_autocast(eager, eager, x, g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_autocast_compiles(name, dtype):
    """AOTAutograd traces the backward under autocast; products in float16 would overflow."""
    for a, b in zip(*_both_under_autocast(UNDER_AUTOCAST[name], dtype), strict=True):
        assert b.isfinite().all()
        assert_bitwise(a, b, (name, dtype))


@pytest.mark.parametrize("name", ["tensorwise", "blockwise, float32 scales"])
def test_autocast_compiles_what_is_checkpointed(name):
    def wrap(layer):
        return partial(checkpoint, layer, use_reentrant=False)

    for a, b in zip(*_both_under_autocast(UNDER_AUTOCAST[name], torch.float16, wrap), strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise, float32 scales"])
def test_autocast_compiles_for_inference(name):
    layer, x = Float8Linear(64, 48, config=UNDER_AUTOCAST[name]), torch.randn(32, 64)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        assert_bitwise(run(x), layer(x), name)


def test_a_product_that_autocast_sees_overflows(monkeypatch):
    """The fault that the tests above look for."""
    monkeypatch.setattr(cpu, "_float32_mm", torch.mm)
    found, _ = _both_under_autocast(RECIPES["tensorwise"], torch.float16)
    assert not found[1].isfinite().all()


def test_the_functional_form_compiles_with_its_default_config():
    run = torch.compile(float8_linear, backend="aot_eager", fullgraph=True)
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    assert_bitwise(run(x, w), float8_linear(x, w))


def test_high_precision_compiles_its_own_graph_and_back():
    model = _layer("tensorwise")
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 64)
    float8 = run(x)
    with high_precision(model):
        assert not torch.equal(run(x), float8)
    assert_bitwise(run(x).detach(), float8.detach())
