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
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import E4M3, E5M2, Blockwise, Float8Tensor, Rowwise, Tensorwise
from float8.tensor.tensor import OP_TABLE, implements

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
    value = oracle.values(q.float8_data, q.scale, block)
    assert_bitwise(q.dequantize(), value.float().to(x.dtype), replay, "value")


def test_granularity_is_tensorwise_unless_said():
    x = torch.randn(3, 5)
    assert_same_float8(quantize(x, E4M3), quantize(x, torch.float8_e4m3fn, Tensorwise()))


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (2, 1, 3, 4), (0,), (3, 0)], ids=str)
def test_any_rank(shape):
    x = Case(shape, seed=3).make()
    q = quantize(x, E4M3)
    assert q.shape == x.shape
    assert q.block == (-1,) * len(shape)
    assert_bitwise(q.float8_data, oracle.cast(x, q.scale, q.block, torch.float8_e4m3fn))


@pytest.mark.parametrize("given", [0.5, torch.tensor(0.5), torch.full((6, 1), 0.5)], ids=str)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_a_given_scale_is_used_and_the_cast_saturates(given, dtype):
    x = Case((6, 40), exponent=16, specials=("nan", "inf")).make()
    q = quantize(x, dtype, Rowwise(), given)
    scale = torch.full((6, 1), 0.5)
    assert_bitwise(q.scale, scale)
    assert_bitwise(q.float8_data, oracle.cast(x, scale, (1, -1), dtype))


@pytest.mark.parametrize("shape", [(), (6, 1)], ids=str)
def test_a_given_scale_is_taken_as_it_is_now(shape):
    x, scale = torch.randn(6, 40), torch.full(shape, 0.5)
    q = quantize(x, E4M3, Rowwise(), scale)
    before = q.dequantize()
    scale.fill_(3.0)
    assert_bitwise(q.dequantize(), before)


def test_dequantize_to_another_dtype():
    q = example()
    value = oracle.values(q.float8_data, q.scale, q.block).float()
    for dtype in shapes.HIGH_PRECISION:
        assert_bitwise(q.dequantize(dtype), value.to(dtype), dtype)


@EVERY_GRANULARITY
def test_random_gradients_pass_through_unrounded(name):
    x = torch.randn(6, 40, requires_grad=True)
    g = torch.randn(6, 40)
    q = quantize(x, E4M3, shapes.GRANULARITIES[name])
    assert q.requires_grad
    q.dequantize().backward(g)
    assert_bitwise(x.grad, g, name)


def test_gradients_come_back_in_the_dtype_of_what_they_belong_to():
    x = torch.randn(6, 40, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(6, 40)
    quantize(x, E4M3).dequantize(torch.float32).backward(g)
    assert_bitwise(x.grad, g.bfloat16())


def test_gradients_pass_through_changes_of_shape():
    x = torch.randn(6, 40, requires_grad=True)
    g = torch.randn(40, 2)
    quantize(x, E4M3).view(2, 3, 40)[1].t()[:, 1:].dequantize().backward(g)
    expected = torch.zeros(6, 40)
    expected[4:] = g.t()
    assert_bitwise(x.grad, expected)


def test_casting_does_not_track_the_amax():
    x = torch.randn(6, 40, requires_grad=True)
    q = quantize(x, E4M3)
    assert not q.scale.requires_grad
    assert not q.float8_data.requires_grad


# --- bad input


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_what_is_not_high_precision_is_refused_by_name(dtype):
    with pytest.raises(TypeError, match=f"cannot cast {dtype} to float8: convert it to one of"):
        quantize(torch.ones(2, 2).to(dtype), E4M3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_what_is_not_a_format_is_refused(dtype):
    with pytest.raises(TypeError, match=f"{dtype} is not a float8 format"):
        quantize(torch.ones(2, 2), dtype)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39])
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_a_scale_is_finite_and_positive(scale, kind):
    if kind == "tensor":
        scale = torch.tensor([[1.0], [scale], [1.0]])
    with pytest.raises(ValueError, match="scale must be finite and > 0"):
        quantize(torch.ones(3, 2), E4M3, Rowwise(), scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_a_scale_is_float32(dtype):
    with pytest.raises(
        TypeError, match=f"scale must be float32 or torch.float8_e8m0fnu, got {dtype}"
    ):
        quantize(torch.ones(3, 2), E4M3, scale=torch.ones(1, 1, dtype=dtype))
    with pytest.raises(
        TypeError, match=f"scale must be float32 or torch.float8_e8m0fnu, got {dtype}"
    ):
        Float8Tensor(codes(3, 2), torch.ones(1, 1, dtype=dtype), (-1, -1), torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3,), (3, 2), (1,)], ids=str)
def test_a_scale_has_one_number_per_block(shape):
    with pytest.raises(ValueError, match=r"scale must have shape \(3, 1\)") as error:
        quantize(torch.ones(3, 2), E4M3, Rowwise(), torch.ones(shape))
    assert f"got {shape}" in str(error.value)
    with pytest.raises(ValueError, match=r"scale must have shape \(3, 1\)"):
        Float8Tensor(codes(3, 2), torch.ones(shape), (1, -1), torch.float32)


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


def test_the_parts_must_fit_each_other():
    with pytest.raises(TypeError, match="float32 is not a float8 format"):
        Float8Tensor(torch.zeros(3, 2), torch.ones(1, 1), (-1, -1), torch.float32)
    with pytest.raises(TypeError, match="stands for a float32, bfloat16 or float16, not"):
        Float8Tensor(codes(3, 2), torch.ones(1, 1), (-1, -1), torch.float64)
    with pytest.raises(ValueError, match=r"block \(-1,\) does not fit shape \(3, 2\)"):
        Float8Tensor(codes(3, 2), torch.ones(1), (-1,), torch.float32)


@pytest.mark.parametrize("granularity", [Rowwise(), Blockwise(1, 4)], ids=str)
def test_a_granularity_that_the_rank_does_not_have_is_refused(granularity):
    with pytest.raises(ValueError, match="dimension"):
        quantize(torch.tensor(1.0), E4M3, granularity)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (lambda q: q + q, "aten.add"),
        (lambda q: q * 2, "aten.mul"),
        (lambda q: torch.ones(6, 40).bfloat16() * q, "aten.mul"),
        (lambda q: q.mean(), "aten.mean"),
        (torch.relu, "aten.relu"),
        (lambda q: q.add_(1), "aten.add_"),
        (lambda q: torch.bmm(q[None], q[None]), "aten.bmm"),
        (lambda q: q[torch.tensor([0, 1])], "aten.index"),
        (lambda q: q == q, "aten.eq"),
        (lambda q: q.view(torch.uint8), "aten.view.dtype"),
        (lambda q: torch.stack([q, q]), "aten.stack"),
        (lambda q: torch._foreach_mul([q], 2.0), "aten._foreach_mul"),
        (lambda q: nn.functional.softmax(q, -1), "aten._softmax"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_operation_that_is_not_supported_names_itself_and_the_way_out(op, name):
    with pytest.raises(NotImplementedError, match="is not defined for Float8Tensor") as error:
        op(example("tensorwise"))
    assert name in str(error.value)
    assert ".dequantize()" in str(error.value)


def test_an_operation_has_one_implementation():
    func = torch.ops.aten.mm.default
    before = OP_TABLE[func]
    with pytest.raises(ValueError, match=r"aten\.mm\.default is already implemented by _mm"):
        implements(func)(lambda *args: None)
    assert OP_TABLE[func] is before


def test_a_new_operation_is_one_registration(monkeypatch):
    func = torch.ops.aten.neg.default
    assert func not in OP_TABLE
    try:
        implements(func)(lambda func, x: x.dequantize().neg())
        q = example()
        assert_bitwise(-q, -q.dequantize())
    finally:
        OP_TABLE.pop(func, None)


# --- copies of the whole


def through_pickle(q, protocol=pickle.HIGHEST_PROTOCOL):
    return pickle.loads(pickle.dumps(q, protocol))


def through_torch_save(q):
    file = io.BytesIO()
    torch.save({"q": q}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["q"]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "pickle protocol 2": lambda q: through_pickle(q, 2),
    "torch.save": through_torch_save,
}
EVERY_COPY = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@EVERY_COPY
@EVERY_GRANULARITY
def test_a_copy_is_the_same_and_its_own(copied, name):
    q = example(name)
    twin = copied(q)
    assert_same_float8(twin, q, name)
    assert twin.stride() == q.stride()
    q.float8_data.view(torch.uint8).add_(1)
    q.scale.mul_(2)
    assert not torch.equal(twin.scale, q.scale)
    assert not torch.equal(twin.float8_data.view(torch.uint8), q.float8_data.view(torch.uint8))


@EVERY_COPY
def test_a_copy_of_a_view_keeps_its_strides(copied):
    for view in (example().t(), example()[1:4], example("1x32")[:, 32:]):
        assert_same_float8(copied(view), view)


@EVERY_COPY
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_copy_of_a_parameter_is_a_parameter(copied, requires_grad):
    parameter = nn.Parameter(example(), requires_grad=requires_grad)
    twin = copied(parameter)
    assert_same_float8(twin, parameter)
    assert isinstance(twin, nn.Parameter)
    assert isinstance(twin, Float8Tensor)
    assert not isinstance(copied(example().requires_grad_(requires_grad)), nn.Parameter)


def test_what_is_copied_twice_together_stays_one():
    q = example()
    first, second = copy.deepcopy([q, q])
    assert first is second


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


def test_it_can_be_taken_apart_and_put_together():
    q = example("3x5")
    names, meta = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    again = Float8Tensor.__tensor_unflatten__(inner, meta, q.shape, q.stride())
    assert_same_float8(again, q)


# --- print


def test_printing_shows_all_there_is_to_know():
    x = torch.tensor([[1.0, -2.0], [3.0, 448.0]], dtype=torch.bfloat16, requires_grad=True)
    text = repr(quantize(x, E4M3))
    words = ("Float8Tensor(e4m3", "shape=(2, 2)", "block=(-1, -1)", "scale=1", "torch.bfloat16")
    assert [
        word for word in (*words, "cpu", "requires_grad=True", "448.") if word not in text
    ] == []
    rowwise = repr(quantize(x.detach(), E5M2, Rowwise()))
    assert "scale of shape (2, 1)" in rowwise
    assert "requires_grad" not in rowwise
    assert "e5m2" in str(quantize(x.detach(), E5M2))


def test_printing_without_values_shows_the_rest():
    assert "device='meta'" in repr(example("tensorwise").to("meta"))
    with FakeTensorMode() as mode:
        assert "block=(-1, -1)" in repr(mode.from_tensor(example("tensorwise")))


# --- without values


@EVERY_GRANULARITY
def test_it_can_be_made_on_meta(name):
    q = quantize(torch.empty(6, 40, device="meta"), E4M3, shapes.GRANULARITIES[name])
    block = shapes.GRANULARITIES[name].block_of((6, 40))
    assert q.device.type == q.scale.device.type == "meta"
    assert q.scale.shape == oracle.scale_shape((6, 40), block)
    assert q.dequantize().shape == (6, 40)


@EVERY_GRANULARITY
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_can_be_made_of_fake_tensors(name, device):
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(6, 40, dtype=torch.bfloat16, device=device)
        q = quantize(x, E5M2, shapes.GRANULARITIES[name])
        assert (q.device.type, q.dtype, q.format) == (device, torch.bfloat16, E5M2)
        assert q.dequantize().device.type == device


def test_a_given_scale_can_be_fake():
    with FakeTensorMode():
        scale = torch.empty(6, 1)
        assert quantize(torch.empty(6, 40), E4M3, Rowwise(), scale).scale.shape == (6, 1)


def test_sharing_memory_is_refused():
    with pytest.raises(NotImplementedError, match=r"share \.float8_data and \.scale"):
        quantize(torch.randn(4, 4), E4M3).share_memory_()


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_constructor_refuses_scales_that_are_not_positive(scale):
    data = torch.zeros(2, 4).to(E4M3.dtype)
    with pytest.raises(ValueError, match="scale must be > 0"):
        Float8Tensor(data, torch.full((1, 1), scale), (-1, -1), torch.float32)


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
        return made, made.dequantize(), q.dequantize(torch.float32), q.t()

    x = Case((37, 40), torch.bfloat16, fill="wide", seed=1).make()
    q = example(name, Case((37, 40), torch.bfloat16, fill="wide", seed=2))
    actual, expected = compiled(function, backend=backend)(x, q), function(x, q)
    assert_same_float8(actual[0], expected[0], name)
    assert_bitwise(actual[1], expected[1], name)
    assert_bitwise(actual[2], expected[2], name)
    assert_same_float8(actual[3], expected[3], name)


def test_compiled_gradients_pass_through():
    def function(x):
        return quantize(x, E4M3, Rowwise()).t().dequantize()

    x, g = torch.randn(6, 40, requires_grad=True), torch.randn(40, 6)
    compiled(function, backend="aot_eager")(x).backward(g)
    assert_bitwise(x.grad, g.t())


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


def test_another_kind_is_another_graph():
    def function(q):
        return q.dequantize(torch.float32)

    run = compiled(function, backend="aot_eager")
    kinds = [example(), example("tensorwise"), example(fmt=E4M3), example().float()]
    for q in kinds:
        assert_bitwise(run(q), function(q), repr(q))
    assert len({q._stable_hash_for_caching() for q in kinds}) == len(kinds)
    assert example()._stable_hash_for_caching() == example()._stable_hash_for_caching()


@pytest.mark.parametrize("granularity", [Tensorwise(), Rowwise(), Blockwise(1, 8)], ids=str)
def test_the_public_attributes(granularity):
    x = torch.randn(6, 24)
    q = Float8Tensor.from_high_precision(x, E4M3, granularity)
    assert q.float8_data.dtype == torch.float8_e4m3fn and q.scale.dtype == torch.float32
    assert (q.format, q.block) == (E4M3, granularity.block_of(x.shape))
    assert type(q.data) is Float8Tensor  # torch's
    built = Float8Tensor(q.float8_data, q.scale, q.block, q.dtype)
    assert_bitwise(built.dequantize(), q.dequantize())
    twin = pickle.loads(pickle.dumps(q))
    assert torch.equal(twin.scale, q.scale)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("granularity", [Tensorwise(), Rowwise()], ids=str)
def test_compiled_code_reads_the_parts_of_a_tensor_that_it_made_or_was_given(granularity, backend):
    x = torch.randn(6, 24)

    def parts(q):
        return q.float8_data, q.scale, q.data_t, q.block

    def made(x):
        return parts(Float8Tensor.from_high_precision(x, E4M3, granularity))

    q = Float8Tensor.from_high_precision(x, E4M3, granularity)
    for function, argument in ((made, x), (parts, q)):
        actual = torch.compile(function, fullgraph=True, backend=backend)(argument)
        assert_bitwise(actual[0], q.float8_data)
        assert_bitwise(actual[1], q.scale)
        assert actual[2:] == (None, q.block)


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
