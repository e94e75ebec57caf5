"""Every path of a step gives the same bits: in tiles, many parameters together, the fused op.

Of a parameter kept in float8 the float16 master is updated, and the parameter is cast from it.
"""

import pytest
import torch
from assertions import assert_bitwise, sqnr
from torch import nn

from float8 import E4M3, E5M2, Float8Tensor
from float8.kernels import amax, cast_by_scale, moments, optimizer_step, scale_from_amax
from float8.optim import SGD, AdamW


def parameter(x, fmt=E4M3):
    return nn.Parameter(Float8Tensor.from_high_precision(x, fmt))


def in_e5m2(g):
    return Float8Tensor.from_high_precision(g, E5M2)


SHAPES = [(5, 123), (1, 500), (40, 16), (3, 4, 5), (3,), (2, 5), (), (0,), (3, 0), *[(9,)] * 9]
FLOAT32 = {"first_moment": "float32", "second_moment": "float32"}
# name -> (parameter, gradient, dtype, options)
CASES = {
    "float32 states": (nn.Parameter, torch.clone, torch.float32, FLOAT32),
    "codes": (nn.Parameter, torch.clone, torch.float32, {}),
    "random": (nn.Parameter, torch.clone, torch.bfloat16, {"stochastic_rounding": True}),
    "float8 gradients": (nn.Parameter, in_e5m2, torch.float32, {"second_moment": "float16"}),
    "float8 parameters": (parameter, in_e5m2, torch.float32, {}),
}
PATHS = {
    "tiles": [(moments, "TILE_ELEMENTS", 64)],
    "fused": [(optimizer_step, "takes_kernel", lambda *_: True)],  # on a CPU `plain_step`
}


def stepped(case, is_fused=False):
    """Parameters and states after two steps; fused ones unscale, and skip a third between them."""
    kept, coded, dtype, options = CASES[case]
    torch.manual_seed(0)
    params = [kept(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = AdamW(params, lr=0.1, min_size=0, group_size=16, fused=is_fused, **options)
    assert optimizer._step_supports_amp_scaling == is_fused
    for step in range(2):
        gradients = [torch.randn(shape) for shape in SHAPES]
        gradients[5][0, 2] = torch.nan
        for found_inf in (0.0, 1.0)[: 2 if is_fused and step else 1][::-1]:
            for p, g in zip(params, gradients, strict=True):
                p.grad = coded((g * 1024 if is_fused else g).to(dtype))
            if is_fused:
                optimizer.grad_scale = torch.tensor([1024.0])
                optimizer.found_inf = torch.tensor([found_inf])
            optimizer.step()
    plain = (torch.Tensor, nn.Parameter)
    found = [x for p in params for x in (p.detach(), *optimizer.state[p].values())]
    return [x if type(x) in plain else x.dequantize() for x in found]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_a_step_gives_the_same_bits(case, path, monkeypatch):
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None  # registers the ops
    expected = stepped(case)
    for patch in PATHS[path]:
        monkeypatch.setattr(*patch)
    found = stepped(case, path == "fused")
    for mine, theirs in zip(found, expected, strict=True):
        assert_bitwise(mine, theirs, (case, path))


# --- parameters kept in float8


def assert_cast_from_master(p, master):
    """Assert that data and scale are the cast of the master's values."""
    values = master.dequantize()
    scale = scale_from_amax(amax(values, (-1, -1)), 448.0)
    data, mine = p.float8_data, p.scale
    assert_bitwise(mine.reshape(1, 1), scale)
    assert_bitwise(data, cast_by_scale(values, scale, (-1, -1), data.dtype))


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
