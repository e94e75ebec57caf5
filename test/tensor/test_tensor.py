"""`Float8Tensor`: made, read, saved, printed, compiled, and what it refuses.

What single operations do is tested in ``dispatch/``.
"""

from __future__ import annotations

import copy
import io
import pickle

import oracle
import pytest
import shapes
import torch
from assertions import assert_bitwise, assert_same_float8
from hypothesis import given
from hypothesis import strategies as st
from shapes import Case
from torch import nn

from float8 import E4M3, E5M2, Float8Tensor, Rowwise

EVERY_GRANULARITY = pytest.mark.parametrize("name", shapes.GRANULARITIES)
quantize = Float8Tensor.from_high_precision


def example(name="rowwise", case: Case | None = None, fmt=E5M2) -> Float8Tensor:
    """A tensor none of whose metadata is the default."""
    case = case or Case((6, 40), torch.bfloat16, fill="wide", seed=1)
    return quantize(case.make(), fmt, shapes.GRANULARITIES[name])


# --- from high precision and back


@given(
    case=shapes.cases(),
    dtype=st.sampled_from(oracle.DTYPES),
    name=st.sampled_from(list(shapes.GRANULARITIES)),
    scale_format=st.sampled_from(shapes.SCALE_FORMATS),
)
def test_it_has_the_oracles_bits_and_value(case, dtype, name, scale_format):
    x = case.make()
    q = quantize(x, dtype, shapes.GRANULARITIES[name], scale_format=scale_format)
    block = shapes.GRANULARITIES[name].block_of(x.shape)
    codes, scale = oracle.quantize(x, block, dtype, scale_format)
    replay = (case, dtype, name, scale_format)
    assert_bitwise(q.float8_data, codes, replay, "codes")
    assert_bitwise(q.scale, scale, replay, "scale")
    assert (q.shape, q.dtype, q.block, q.format.dtype) == (x.shape, x.dtype, block, dtype)
    assert q.stride() == q.float8_data.stride()
    value = oracle.values(q.float8_data, q.scale, block).float()
    assert_bitwise(q.dequantize(), value.to(x.dtype), replay, "value")
    for other in shapes.HIGH_PRECISION:
        assert_bitwise(q.dequantize(other), value.to(other), replay, f"value in {other}")


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (2, 1, 3, 4), (0,), (3, 0)], ids=str)
def test_any_rank(shape):
    x = Case(shape, seed=3).make()
    q = quantize(x, E4M3)
    assert q.shape == x.shape
    assert q.block == (-1,) * len(shape)
    assert_bitwise(q.float8_data, oracle.cast(x, q.scale, q.block, torch.float8_e4m3fn))


@shapes.pairs(
    name=list(shapes.GRANULARITIES),
    scale_format=shapes.SCALE_FORMATS,
    shape=[(), (0,), (1,), (300,), (70_001,)],
)
def test_a_vector_is_a_row_and_a_number_is_one_element_of_it(name, scale_format, shape):
    x, granularity = Case(shape, fill="wide", seed=3).make(), shapes.GRANULARITIES[name]
    q = quantize(x, E4M3, granularity, scale_format=scale_format)
    row = x.reshape(1, -1)
    block = granularity.block_of(row.shape)
    codes, scale = oracle.quantize(row, block, E4M3.dtype, scale_format)
    assert_bitwise(q.float8_data, codes.reshape(shape))
    assert_bitwise(q.scale, scale.reshape(q.scale.shape))
    values = oracle.values(codes.view(E4M3.dtype), scale, block).float()
    assert_bitwise(q.dequantize(), values.reshape(shape))
    assert_same_float8(torch.zeros_like(q).copy_(x), q)


@pytest.mark.parametrize(
    "given", [0.5, "numpy", torch.tensor(0.5), torch.full((6, 1), 0.5)], ids=repr
)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_a_given_scale_is_used_as_it_is_now_and_the_cast_saturates(given, dtype):
    x, scale = Case((6, 40), exponent=16, specials=("nan", "inf")).make(), torch.full((6, 1), 0.5)
    given = pytest.importorskip("numpy").float32(0.5) if isinstance(given, str) else given
    given = given.clone() if isinstance(given, torch.Tensor) else given
    q = quantize(x, dtype, Rowwise(), given)
    if isinstance(given, torch.Tensor):
        given.fill_(3.0)
    assert_bitwise(q.scale, scale)
    assert_bitwise(q.float8_data, oracle.cast(x, scale, (1, -1), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EVERY_GRANULARITY
def test_random_gradients_pass_through_unrounded_in_the_dtype_of_their_tensor(name, dtype):
    x, g = torch.randn(6, 40, dtype=dtype, requires_grad=True), torch.randn(6, 40)
    q = quantize(x, E4M3, shapes.GRANULARITIES[name])
    assert q.requires_grad and not q.scale.requires_grad and not q.float8_data.requires_grad
    q.dequantize(torch.float32).backward(g)
    assert_bitwise(x.grad, g.to(dtype), name)


def test_gradients_pass_through_changes_of_shape():
    x, g = torch.randn(6, 40, requires_grad=True), torch.randn(40, 2)

    def function(x):
        return quantize(x, E4M3).view(2, 3, 40)[1].t()[:, 1:].dequantize()

    expected = torch.zeros(6, 40)
    expected[4:] = g.t()
    for run in (function, compiled(function, backend="aot_eager")):
        x.grad = None
        run(x).backward(g)
        assert_bitwise(x.grad, expected)


# --- refusals

CODES, ONE, THREE = torch.zeros(3, 2).to(E4M3.dtype), torch.ones(1, 1), torch.ones(3, 2)
REFUSED = [
    (lambda: quantize(THREE.double(), E4M3), TypeError, "one of .*, not torch.float64"),
    (lambda: quantize(CODES, E4M3), TypeError, "one of .*, not torch.float8_e4m3fn"),
    (lambda: quantize(THREE, torch.uint8), TypeError, "torch.uint8 is not a float8 format"),
    *(
        (lambda scale=scale: quantize(THREE, E4M3, Rowwise(), scale), ValueError, "finite and > 0")
        for scale in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39)
    ),
    *(
        (lambda scale=scale: quantize(THREE, E4M3, Rowwise(), scale), ValueError, "scale must be")
        for scale in (ONE, torch.ones(3, 2), torch.ones(3, 1).double())
    ),
    (lambda: Float8Tensor(THREE, ONE, (-1, -1), torch.float32), TypeError, "not a float8 format"),
    (lambda: Float8Tensor(CODES, ONE, (-1, -1), torch.float64), TypeError, "one of .*, not"),
    (lambda: Float8Tensor(CODES, ONE, (1, -1), torch.float32), ValueError, r"shape \(3, 1\)"),
    (lambda: Float8Tensor(CODES, ONE[0], (-1,), torch.float32), ValueError, "one extent per"),
    (lambda: example("tensorwise").share_memory_(), NotImplementedError, "share .float8_data"),
    *(
        (
            lambda op=op: op(example("tensorwise")),
            NotImplementedError,
            rf"{name}.* is not defined for Float8Tensor.*\.dequantize\(\)",
        )
        for op, name in (
            (lambda q: q + q, "aten.add"),
            (lambda q: torch.ones(6, 40).bfloat16() * q, "aten.mul"),
            (lambda q: torch.bmm(q[None], q[None]), "aten.bmm"),
            (lambda q: q.__setitem__(torch.tensor([0, 1]), 1.0), "aten.index_(put|fill)_"),
            (lambda q: q.view(torch.uint8), "aten.view.dtype"),
        )
    ),
]


@pytest.mark.parametrize(("run", "error", "words"), REFUSED)
def test_what_is_wrong_is_refused_in_words(run, error, words):
    with pytest.raises(error, match=words):
        run()


# --- copies of the whole


def through_pickle(q):
    return pickle.loads(pickle.dumps(q))


def through_torch_save(q):
    file = io.BytesIO()
    torch.save({"q": q}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["q"]


def through_flatten(q):
    names, meta = q.__tensor_flatten__()
    inner = {name: getattr(q, name).clone() for name in names}
    return Float8Tensor.__tensor_unflatten__(inner, meta, q.shape, q.stride())


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "flatten": through_flatten,
}


@pytest.mark.parametrize("how", COPIES)
@EVERY_GRANULARITY
def test_a_copy_is_the_same_and_its_own(how, name):
    """Views keep their strides; a parameter is a parameter."""
    q, copied = example(name), COPIES[how]
    twin = copied(q)
    assert_same_float8(twin, q, name)
    assert twin.stride() == q.stride()
    q.float8_data.view(torch.uint8).add_(1)
    q.scale.mul_(2)
    assert not torch.equal(twin.scale, q.scale)
    assert not torch.equal(twin.float8_data.view(torch.uint8), q.float8_data.view(torch.uint8))
    for view in (q.t(), q[:, 32:] if name == "1x32" else q[:]):
        assert_same_float8(copied(view), view)
    for requires_grad in (False, True) if how != "flatten" else ():
        twin = copied(nn.Parameter(q, requires_grad=requires_grad))
        assert isinstance(twin, nn.Parameter) and isinstance(twin, Float8Tensor)
        assert twin.requires_grad == requires_grad
        twin = copied(example().requires_grad_(requires_grad))
        assert not isinstance(twin, nn.Parameter) and twin.requires_grad == requires_grad


def test_a_module_may_hold_it():
    class Holder(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            case = Case((6, 40), torch.bfloat16, seed=seed)
            self.weight = nn.Parameter(example(case=case), requires_grad=False)
            self.register_buffer("cache", example("tensorwise", case))

    one, other = Holder(1), Holder(2)
    other.load_state_dict(through_torch_save(one.state_dict()), strict=True)
    assert_same_float8(other.weight, one.weight)
    assert_same_float8(other.cache, one.cache)
    other.to(torch.float32)
    assert (other.weight.dtype, other.cache.dtype) == (torch.float32, torch.float32)
    assert_bitwise(other.weight.float8_data, one.weight.float8_data)
    assert [p.shape for p in copy.deepcopy(one).parameters()] == [(6, 40)]
    assert one.to("meta").weight.scale.device.type == "meta"
    first, second = copy.deepcopy([one.weight, one.weight])
    assert first is second


# --- compiled


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, **{"dynamic": False, **options})


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in shapes.GRANULARITIES), ("1x32", "inductor")],
)
def test_compiled_code_makes_reads_and_returns_it(name, backend):
    """By inductor once: the bits of its casts are claimed in kernels/test_cpu.py."""

    def function(x, q):
        made = quantize(x, E5M2, shapes.GRANULARITIES[name])
        parts = [(t.float8_data, t.scale, t.data_t, t.block) for t in (made, q)]
        return made, q.t(), made.dequantize(), q.dequantize(torch.float32), parts

    x = Case((37, 40), torch.bfloat16, fill="wide", seed=1).make()
    q = example(name, Case((37, 40), torch.bfloat16, fill="wide", seed=2))
    actual, expected = compiled(function, backend=backend)(x, q), function(x, q)
    for i, check in enumerate([assert_same_float8] * 2 + [assert_bitwise] * 2):
        check(actual[i], expected[i], name)
    for mine, theirs in zip(actual[4], expected[4], strict=True):
        assert_bitwise(mine[0], theirs[0], name)
        assert_bitwise(mine[1], theirs[1], name)
        assert mine[2:] == theirs[2:]


def test_one_compiled_graph_serves_every_batch_size():
    def function(q):
        return q.view(-1, 40).dequantize(torch.float32)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5, 8):
        q = example(case=Case((2, rows, 40), torch.bfloat16))
        assert_bitwise(run(q), function(q), rows)
    assert len(graphs) == 1


def test_data_takes_the_codes_and_the_scale_of_another_float8_tensor_or_is_refused():
    torch.manual_seed(0)
    x = Float8Tensor.from_high_precision(torch.randn(16, 32), E4M3)
    other = Float8Tensor.from_high_precision(torch.randn(8, 48).bfloat16(), E5M2, Rowwise())
    parameter = nn.Parameter(x, requires_grad=False)
    with pytest.raises(TypeError, match=r"cannot become a Tensor: .* x.copy_\(values\)"):
        parameter.data = parameter.dequantize() + 1
    assert parameter.equal(x)
    parameter.data = other
    assert parameter.equal(other)
    assert parameter.dtype is torch.bfloat16
    assert parameter.shape == (8, 48)
    assert torch.equal(parameter.data.dequantize(), other.dequantize())
