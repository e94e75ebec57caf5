"""The layer on its kernels' path, on a CPU: the ops of CUDA tensors, with their references.

The table `KERNELS` says which op of ``float8/kernels/gpu/`` casts. With the rows of a GPU, CPU
tensors go the way of CUDA ones: both orientations from one op, the amax recorded by
it, the weight cast again for its columns alone. Every op has its reference on a CPU, so all bits
must be those of the plain path, in eager mode and compiled, where the ops are opaque.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from assertions import assert_all_bitwise
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from layer_check import skip_if_refused
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from float8 import (
    Float8Linear,
    cached_weights,
    float8_linear,
    grouped_mm,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES, CastConfig, Float8LinearConfig, ScalingType
from float8.kernels import casts
from float8.kernels.casts import GROUP_KERNELS, KERNELS
from float8.kernels.grouped_products import grouped_gemm_for
from float8.kernels.products import CPU
from float8.linear.plan import USED, plan_of

for file in (*KERNELS["sm_90"].values(), *GROUP_KERNELS["sm_90"].values()):
    importlib.import_module(f"float8.kernels.gpu.{file}")

STATIC = CastConfig(ScalingType.STATIC, static_scale=0.03)
CONFIGS = RECIPES | {"static": Float8LinearConfig(STATIC, STATIC, STATIC)}
CONFIGS["dequantised"] = replace(RECIPES["mxfp8_2d"], dequantize_in_backward=True)


@contextmanager
def kernel_path():
    """Casts by the Triton kernels' ops, whose CPU implementation is the definition."""
    with mock.patch.dict(KERNELS, {CPU: KERNELS["sm_90"]}):
        USED.clear()
        yield
    USED.clear()


@contextmanager
def grouped_kernel_path():
    """Grouped GEMMs as on an sm_89, by ops whose CPU implementation is the definition."""

    def gemm(family, *arguments):
        return grouped_gemm_for("sm_89", *arguments)

    gemms = mock.patch("float8.kernels.grouped_gemm_for", gemm)
    with mock.patch.dict(GROUP_KERNELS, {CPU: GROUP_KERNELS["sm_89"]}), gemms, kernel_path():
        yield


def layer_of(name, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Float8Linear(48, 32, dtype=dtype, config=CONFIGS[name])


def steps(layer, run=None, count=3, microbatches=2, shape=(2, 24, 48)):
    """Everything that training leaves: outputs, gradients, state."""
    left = []
    for step in range(count):
        for i in range(microbatches):
            torch.manual_seed(10 * step + i)
            x = torch.randn(shape, dtype=layer.weight.dtype, requires_grad=True)
            out = (layer if run is None else run)(x)
            out.backward(torch.randn_like(out))
            left += [out.detach(), x.grad]
        left += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        left += [b.clone() for b in layer.buffers()]
        sync_float8_amax_and_scale_history(layer)
    return left


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in CONFIGS for how in ("eager", "cached")),
        *((name, "frozen") for name in ("tensorwise", "rowwise")),
        *((name, "compiled") for name in ("tensorwise", "rowwise", "blockwise")),
    ],
)
def test_same_bits_as_the_plain_path(name, how):
    def run(layer):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        layer.weight.requires_grad_(how != "frozen")
        with cached_weights(layer) if how == "cached" else nullcontext():
            return steps(layer, compiled if how == "compiled" else None)

    with kernel_path():
        got = run(layer_of(name))
    how = how.replace("compiled", "eager")
    assert_all_bitwise(got, run(layer_of(name)), name)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "unit"])
def test_a_grouped_gemm_has_the_bits_of_the_plain_path(name, compiled):
    """Its tokens by `cast_tokens`, padded per group, and its experts as stacks of matrices."""
    torch.manual_seed(0)
    x, g = (torch.randn(70, n).bfloat16() for n in (48, 32))
    w = torch.randn(4, 32, 48).bfloat16()

    def product(x, w, offs):
        return grouped_mm(x, w.mT, offs, RECIPES[name])

    run = torch.compile(product, backend="aot_eager", fullgraph=True) if compiled else product
    for ends in ((5, 5, 45, 64), (0, 33, 34, 70)):
        offs, results = torch.tensor(ends, dtype=torch.int32), []
        for function, path in ((product, nullcontext), (run, grouped_kernel_path)):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            with path():
                out = function(*leaves, offs)
                results.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
        assert_all_bitwise(results[1], results[0], (name, ends))


@contextmanager
def ptxas(version):
    """With Triton's assembler of this version."""
    found = SimpleNamespace(version=version, path="/a/ptxas")
    casts._ptxas_that_loses_conversions.cache_clear()
    with mock.patch("triton.backends.nvidia.compiler.get_ptxas", return_value=found):
        yield
    casts._ptxas_that_loses_conversions.cache_clear()


@pytest.mark.parametrize(("version", "static"), [("13.1", 1), ("13.10", 1), ("12.9", 2)])
def test_a_compiled_static_cast_is_left_to_the_compiler_where_ptxas_is_right(
    version, static, monkeypatch
):
    """Its op is opaque: the product of one that joins its producer is a byte per element."""
    with ptxas(version):
        may_cast = casts.compiler_may_cast("sm_90")

    def compiler_may_cast(family):
        return may_cast

    compiler_may_cast._dynamo_marked_constant = True
    monkeypatch.setattr("float8.kernels.compiler_may_cast", compiler_may_cast)
    for name, opaque in (("static", static), ("delayed", 2)):
        with kernel_path(), mock.patch("torch.compiler.is_compiling", return_value=True):
            x = torch.empty(16, 16, dtype=torch.bfloat16)
            plan = plan_of(CONFIGS[name], x)
        casts_of_forward = plan.x.first, plan.w.first
        assert sum(cast.kernel is not None for cast in casts_of_forward) == opaque, name


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_compiled_layers_that_read_one_tensor_share_its_cast(name):
    """Three weights, and one input."""
    q, k, v = (layer_of(name) for _ in range(3))
    counts = []

    def compiler(graph, _inputs):
        op = torch.ops.float8.cast.default
        counts.append(sum(op in (node.target, *node.args[:1]) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    x = torch.randn(24, 48, dtype=torch.bfloat16, requires_grad=True)
    with kernel_path():
        torch.compile(lambda x: q(x) + k(x) * v(x), backend=backend, fullgraph=True)(x)
    assert counts == [4]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_cast_that_the_compiler_would_get_wrong_is_refused(name):
    """One that no kernel runs, as of a DTensor or with emulate=True, on a GPU."""
    words = r"ptxas 12.8 \(/a/ptxas\) for sm_90 loses.*TRITON_PTXAS_PATH"
    config = replace(RECIPES[name], emulate=True)

    def product(x, w):
        return float8_linear(x, w, None, config)

    with FakeTensorMode(), ptxas("12.8"):
        x, w = (torch.empty(64, 64, device="cuda") for _ in range(2))
        product(x, w)
        with pytest.raises(Exception, match=words):
            torch.compile(product, backend="eager", fullgraph=True)(x, w)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_cuda_graph_replays_the_step(name):
    """Captured by hand: forward and backward read nothing on the host."""
    skip_if_refused(CONFIGS[name])
    layer = layer_of(name).to("cuda")
    x = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)

    def step():
        layer.zero_grad()
        x.grad = None
        out = layer(x)
        out.backward(g)
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        sync_float8_amax_and_scale_history(layer)
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [t.clone() for t in captured]
    assert_all_bitwise(replayed, step(), name)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one to warm up
def test_reduce_overhead(name):
    skip_if_refused(CONFIGS[name])
    layer = layer_of(name).to("cuda")
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        # Gradients live in the graph's memory: the next step would write over those that are
        # accumulated into (pytorch#169545).
        layer.zero_grad()
        x = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = compiled(x).clone()
        out.backward(torch.randn_like(out))
        expected = layer(x.detach())
        assert (out - expected).float().norm() <= 0.01 * expected.float().norm()
        sync_float8_amax_and_scale_history(layer)
