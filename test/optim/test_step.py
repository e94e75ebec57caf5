"""A step in tiles, or of many parameters together, is the step of each parameter at once.

Of a parameter kept in float8 the float16 master is updated, and the parameter is cast from it.
"""

import copy
import weakref

import pytest
import torch
from assertions import assert_bitwise, sqnr
from shapes import pairs
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import E4M3, E5M2, Float8Tensor
from float8.kernels import amax, cast, optimizer_step, scale_from_amax
from float8.kernels.moments import StateMatrix
from float8.kernels.update_rules import AdamW as Rule
from float8.optim import SGD, AdamW, moment
from float8.optim import optimizer as optimizer_module
from float8.optim import step as step_module
from float8.optim.moment import Moment, matrix_of, tiles
from float8.optim.step import (
    Work,
    advance,
    advance_fused,
    advance_together,
    buckets,
    may_be_batched,
)

RULE = Rule(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def made(shape, dtype=torch.float32, kinds=("float8", "float8_expanded"), group=16, random=False):
    p, g = torch.randn(shape).to(dtype), torch.randn(shape)
    states = [torch.randn(shape) * 0.1, torch.rand(shape) * 0.01]
    states = [
        StateMatrix(matrix_of(x)) if kind is None else Moment.quantize(x, kind, group).matrix()
        for x, kind in zip(states, kinds, strict=True)
    ]
    gradient, at_random = StateMatrix(matrix_of(g)), [random, False, random]
    return Work(matrix_of(p), None, None, gradient, states, group, 7, at_random, 3.0)


def tensors_of(work):
    return [work.parameter, *(x for state in work.states for x in state.tensors())]


@pairs(
    shape=[(5, 123), (1, 500), (40, 16), (3, 0)],
    dtype=[torch.float32, torch.bfloat16],
    kinds=[("float8", "float8_expanded"), ("float8", "float16"), (None, None)],
    random=[False, True],
)
def test_the_size_of_tiles_changes_nothing(monkeypatch, shape, dtype, kinds, random):
    results = []
    for size in (64, 2**20):
        torch.manual_seed(0)
        work = made(shape, dtype, kinds, random=random)
        monkeypatch.setattr(moment, "TILE", size)
        advance(work, RULE)
        results.append(tensors_of(work))
    for small, large in zip(*results, strict=True):
        assert_bitwise(small, large, (shape, dtype, kinds, random))


def test_together_is_one_by_one():
    kinds = (None, None)
    works = [made(shape, kinds=kinds) for shape in [(3,), (2, 5), (1,), (0,)]]
    copies = [
        w._replace(
            parameter=w.parameter.clone(),
            states=[StateMatrix(state.codes.clone()) for state in w.states],
        )
        for w in works
    ]
    assert all(may_be_batched(w) for w in works)
    advance_together(works, RULE)
    for work, alone in zip(works, copies, strict=True):
        advance(alone, RULE)
        for mine, theirs in zip(tensors_of(work), tensors_of(alone), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_together_records_the_amaxes_that_are_asked_for(dtype):
    works = [made(shape, dtype, kinds=(None, None)) for shape in [(3,), (2, 5), (1, 1), (0,)]]
    works[1].gradient.codes[0, 2] = torch.nan
    works = [w._replace(amax=torch.zeros(1) if i != 2 else None) for i, w in enumerate(works)]
    assert all(may_be_batched(w) for w in works)
    advance_together(works, RULE)
    for work in works:
        if work.amax is not None:
            assert_bitwise(work.amax.view(1, 1), amax(work.parameter, (-1, -1)))
    assert works[1].amax.isnan()
    assert works[2].amax is None


def test_large_quantised_and_stochastically_rounded_parameters_are_not_batched():
    assert not may_be_batched(made((3, 4)))
    assert not may_be_batched(made((3, 4), kinds=(None, None), random=True))
    assert not may_be_batched(made((600, 600), kinds=(None, None)))


def test_buckets_are_bounded(monkeypatch):
    monkeypatch.setattr(step_module, "TILE", 10)
    works = [made((n,), kinds=(None, None)) for n in (4, 4, 4, 20, 1)]
    assert [[w.parameter.numel() for w in b] for b in buckets(works)] == [[4, 4], [4], [20], [1]]


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside have had at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {
            x.untyped_storage().data_ptr()
            for x in pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage):
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size):
        self.now -= size


@pytest.mark.parametrize("random", [False, True])
def test_a_step_needs_little_memory_of_its_own(monkeypatch, random):
    monkeypatch.setattr(moment, "TILE", 2**12)
    work = made((256, 512), random=random)
    with Live() as live:
        advance(work, RULE)
    tile = 4 * 2**12
    assert tile < live.most <= 30 * tile, f"{live.most / tile:.1f} tiles of float32"
    assert live.most < 4 * work.parameter.numel(), "less than one float32 copy of the parameter"


class Drift:
    """A rule whose update is always the same."""

    def update(self, step, p, g, m, v):
        return p + 2.0**-14, m, v


def test_a_parameter_rounded_at_random_moves_on_average():
    """An update of a hundredth of a bfloat16 step is lost to nearest, and not at random."""
    p = torch.ones(64, 64, dtype=torch.bfloat16)
    for random in (False, True):
        p.fill_(1)
        work = made((64, 64), kinds=(None, None), random=random)._replace(parameter=p)
        for step in range(200):
            advance(work._replace(step=float(step)), Drift())
        moved = float(p.float().mean()) - 1
        expected = 200 * 2.0**-14
        assert abs(moved - expected) < 0.05 * expected if random else moved == 0


# --- tiles


@pytest.mark.parametrize(
    ("shape", "group", "size"),
    [
        ((5, 123), 16, 50),
        ((1, 1000), 128, 256),
        ((7, 300), 128, 64),  # a tile has at least one group
        ((3, 128), 128, 10**6),
        ((0, 7), 4, 8),
        ((7, 0), 4, 8),
        ((1, 1), 128, 1),
    ],
)
def test_every_element_is_in_one_tile_and_no_group_is_cut(shape, group, size):
    seen = torch.zeros(shape, dtype=torch.int64)
    order = []
    for rows, cols in tiles(shape, group, size):
        seen[rows, cols] += 1
        assert cols.start % group == 0
        assert cols.stop % group == 0 or cols.stop == shape[1]
        assert (rows.stop - rows.start) * (cols.stop - cols.start) <= max(size, group)
        inside = torch.arange(seen.numel()).view(shape)[rows, cols].flatten()
        assert torch.equal(inside, torch.arange(len(inside)) + inside[0]), "not in a run"
        order.append(int(inside[0]))
    assert bool((seen == 1).all())
    assert order == sorted(order)


# --- parameters kept in float8


def parameter(x, fmt=E4M3):
    return nn.Parameter(Float8Tensor.from_high_precision(x, fmt))


def assert_cast_from_master(p, master):
    """Assert that data and scale are the cast of the master's values."""
    values = master.dequantize()
    scale = scale_from_amax(amax(values, (-1, -1)), 448.0)
    data, mine = p.float8_data, p.scale
    assert_bitwise(mine.reshape(1, 1), scale)
    assert_bitwise(data, cast(values, scale, (-1, -1), data.dtype))


@pytest.mark.parametrize("lr", [1e-3, 1e-4])
def test_small_updates_add_up_in_the_master(lr):
    """A hundred steps of a tenth of a code's distance each, or of a tenth of a float16's."""
    value = torch.rand(64, 96) + 1
    p, q = parameter(value), nn.Parameter(value.clone())
    kept = {"first_moment": "float32", "second_moment": "float32"}  # so that all noise is its own
    ours, exact = AdamW([p], lr=lr, **kept), torch.optim.AdamW([q], lr=lr)
    ours.start_master(p, value)
    where = p.float8_data.data_ptr()
    for _ in range(100):
        g = torch.randn(64, 96) * 0.1 + 1
        p.grad, q.grad = g, g.clone()
        ours.step()
        exact.step()
        assert_cast_from_master(p, ours.state[p]["master"])
    assert p.float8_data.data_ptr() == where, "the model and its wrappers hold this memory"
    assert sqnr(ours.state[p]["master"].dequantize(), q) > 50
    moved = q.detach() - value
    master = ours.state[p]["master"].dequantize()
    assert float((master - value).mean()) == pytest.approx(float(moved.mean()), rel=0.02)
    assert float((p.detach().dequantize() - value).mean()) == pytest.approx(-100 * lr, rel=0.3)


def test_a_master_that_is_not_updated_is_seen():
    """The claim above fails where an update goes to the codes alone: it is below half a code."""
    value = torch.rand(64, 96) + 1
    p = parameter(value)
    optimizer = AdamW([p], lr=1e-3)
    optimizer.start_master(p, value)
    stale = copy.deepcopy(optimizer.state[p]["master"])
    for _ in range(100):
        p.grad = torch.ones(64, 96)
        optimizer.step()
        optimizer.state[p]["master"].copy_(stale)
    assert abs(float((p.detach().dequantize() - value).mean())) < 0.02


def test_the_first_value_counts_or_else_what_the_codes_hold():
    value = torch.randn(40, 130)
    p = parameter(value)
    optimizer = AdamW([p], lr=0.0, weight_decay=0.0)
    p.grad = torch.zeros(40, 130)
    optimizer.step()
    assert sqnr(optimizer.state[p]["master"].dequantize(), p.dequantize()) > 65
    optimizer.start_master(p, value)
    assert sqnr(optimizer.state[p]["master"].dequantize(), value) > 65
    assert_cast_from_master(p, optimizer.state[p]["master"])


def test_float8_gradients_are_decoded():
    """With one scale tile by tile, otherwise at once; for plain parameters too."""
    value, g = torch.randn(40, 130), torch.randn(40, 130)
    coded = Float8Tensor.from_high_precision(g, E5M2)
    results = []
    for grad in (coded, coded.dequantize()):
        p, q = parameter(value), nn.Parameter(value.clone())
        optimizer = SGD([p, q], lr=0.1, min_size=0)
        p.grad, q.grad = grad, grad
        optimizer.step()
        results.append((p.dequantize(), q.detach().clone()))
    for mine, theirs in zip(*results, strict=True):
        assert_bitwise(mine, theirs)


@pytest.mark.parametrize("shape", [(0, 8), (), (5,), (3, 4, 5)])
def test_weird_shapes_of_float8_parameters(shape):
    p = parameter(torch.randn(shape))
    p.grad = torch.randn(shape)
    before = p.dequantize()
    AdamW([p], lr=0.1).step()
    assert p.shape == before.shape
    assert bool((p.dequantize() != before).all())


def test_transposed_codes_are_written_too():
    value = torch.randn(64, 48)
    plain = Float8Tensor.from_high_precision(value, E4M3)
    p = nn.Parameter(plain.t())
    assert not p.float8_data.is_contiguous()
    optimizer = AdamW([p], lr=0.5)
    optimizer.start_master(p, value.t())
    p.grad = torch.ones(48, 64)
    optimizer.step()
    assert_cast_from_master(p, optimizer.state[p]["master"])
    assert bool((p.dequantize() != value.t()).all())


def test_one_nan_is_one_weight_and_not_part_of_the_scale():
    p = parameter(torch.randn(16, 64) * 0.01)
    optimizer = AdamW([p], lr=0.01)
    p.grad = torch.randn(16, 64)
    p.grad[2, 3] = float("nan")
    optimizer.step()
    bad = p.dequantize().isnan()
    assert bool(bad[2, 3])
    assert int(bad.sum()) == 1
    finite = optimizer.state[p]["master"].dequantize().nan_to_num(0.0)
    scale = scale_from_amax(amax(finite, (-1, -1)), 448.0)
    assert_bitwise(p.scale.reshape(1, 1), scale)


def test_what_has_no_master_cannot_start_one():
    p, q = parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    optimizer = AdamW([p, q])
    with pytest.raises(TypeError, match="only a Float8Tensor parameter has a master"):
        optimizer.start_master(q, q)
    with pytest.raises(ValueError, match=r"shape \(8, 8\) cannot start .* shape \(2, 2\)"):
        optimizer.start_master(p, torch.ones(2, 2))
    with pytest.raises(ValueError, match="not in this optimizer"):
        optimizer.start_master(parameter(torch.randn(8, 8)), torch.ones(8, 8))


@pytest.mark.parametrize("grad", [torch.Tensor.clone, Float8Tensor.from_high_precision])
@pytest.mark.parametrize("kept", [nn.Parameter, parameter])
def test_a_fused_step_is_the_step_in_tiles(kept, grad, monkeypatch):
    """On the CPU the kernel's op is `plain_step`; GradScaler's protocol is the op's."""
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None  # registers the ops
    g = grad(torch.randn(40, 130), *([E5M2] if grad is not torch.Tensor.clone else []))
    results = []
    for is_fused in (False, True):
        monkeypatch.setattr(optimizer_module, "takes_kernel", lambda *_, fused=is_fused: fused)
        torch.manual_seed(0)
        p = kept(torch.randn(40, 130))
        optimizer = AdamW([p], lr=0.1, min_size=0, fused=is_fused)
        for found_inf in (0.0, 1.0, 0.0):
            p.grad = g
            if is_fused:
                optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.tensor(found_inf)
            if is_fused or not found_inf:  # a plain optimizer's step is skipped by GradScaler
                optimizer.step()
        state = optimizer.state[p]
        results.append([p.detach(), *(state[name] for name in sorted(state))])
    for pair in zip(*results, strict=True):
        assert_bitwise(*(x.dequantize() if type(x) is not torch.Tensor else x for x in pair))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_records_the_amax_of_the_parameter(dtype, is_fused, monkeypatch):
    """In tiles or fused, of parts of any shape; a step that GradScaler skips leaves the old one."""
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None
    monkeypatch.setattr(moment, "TILE", 64)
    for shape in ((5, 123), (1, 7), (3, 0)):
        for found_inf in (None, 1.0) if is_fused else (None,):
            work = made(shape, dtype, random=dtype == torch.bfloat16)
            work = work._replace(amax=torch.zeros(1))
            before, version = work.parameter.clone(), work.parameter._version
            if is_fused:
                advance_fused(work, RULE, None, found_inf and torch.tensor(found_inf))
            else:
                advance(work, RULE)
            assert_bitwise(work.amax.view(1, 1), amax(work.parameter, (-1, -1)))
            assert work.parameter._version > version or not work.parameter.numel()
            assert torch.equal(work.parameter, before) == (
                bool(found_inf) or not work.parameter.numel()
            )


def test_a_fused_step_divides_the_gradient_by_the_scale(monkeypatch):
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None
    monkeypatch.setattr(optimizer_module, "takes_kernel", lambda *_: True)
    results = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(8, 64))
        p.grad = torch.randn(8, 64) * scale
        optimizer = AdamW([p], min_size=0, fused=True)
        assert optimizer._step_supports_amp_scaling
        optimizer.grad_scale, optimizer.found_inf = torch.tensor([scale]), torch.zeros(1)
        optimizer.step()
        results.append(p.detach())
    assert_bitwise(*results)
