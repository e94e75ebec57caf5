"""A moment is codes and scales in memory, and decodes to float32."""

import copy
import io
import math
import pickle

import oracle
import pytest
import torch
import torch.utils._pytree as pytree
from assertions import assert_bitwise, sqnr
from shapes import pairs

from float8.kernels.moments import matrix_shape
from float8.optim.moment import Moment

KINDS = "float8", "float8_expanded", "float16"
SHAPES = [(5, 123), (3, 128), (1, 300), (300,), (), (4, 3, 2, 5), (0, 7), (5, 0), (1,)]


def made(shape, kind, group=16):
    x = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    return x.square() if kind == "float8_expanded" else x


def exact(moment):
    """The values in float64, group by group, from the bit fields of the codes."""
    shape = moment.codes.shape
    rows, cols = matrix_shape(shape)
    codes = moment.codes.reshape(rows, cols)
    if codes.dtype == torch.float16:
        values = codes.double()
    else:
        values = oracle.table(codes.dtype)[codes.view(torch.uint8).long()]
    index = torch.arange(cols) // moment.group
    scale = moment.scale.double()[:, index]
    if moment.exponent is None:
        return (values * scale).reshape(shape)
    powered = (values.abs() / 448) ** moment.exponent.double()[:, index]
    return (powered.copysign(values) * scale).reshape(shape)


@pairs(shape=SHAPES, kind=KINDS, group=[1, 16, 128])
def test_the_codes_mean_what_the_formula_says(shape, kind, group):
    x = made(shape, kind)
    moment = Moment.quantize(x, kind, group)
    values = moment.dequantize()
    assert (values.shape, values.dtype, moment.kind) == (x.shape, torch.float32, kind)
    torch.testing.assert_close(values.double(), exact(moment), rtol=1e-5, atol=0)
    if x.numel():
        least = {"float8": 25, "float8_expanded": 20, "float16": 65}[kind]
        assert group == 1 or sqnr(moment.dequantize(), x) > least


@pairs(shape=SHAPES, kind=KINDS)
def test_zeros_are_what_zeros_quantise_to(shape, kind):
    zeros, coded = Moment.zeros(shape, kind, 16), Moment.quantize(torch.zeros(shape), kind, 16)
    for mine, theirs in zip(parts(zeros), parts(coded), strict=True):
        assert_bitwise(mine, theirs, (shape, kind))
    assert not zeros.dequantize().any()


def parts(moment):
    return moment.matrix().tensors()


def saved_and_loaded(moment):
    torch.save(moment, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_moves_keep_the_bits(kind):
    moment = Moment.quantize(made((6, 50), kind), kind, 16)
    copies = {
        "deepcopy": copy.deepcopy(moment),
        "pickle": pickle.loads(pickle.dumps(moment)),
        "file": saved_and_loaded(moment),
        "tree": pytree.tree_map_only(torch.Tensor, torch.clone, moment),
    }
    for name, other in copies.items():
        assert type(other) is Moment, name
        for mine, theirs in zip(parts(moment), parts(other), strict=True):
            assert_bitwise(theirs, mine, (kind, name))
    assert copies["deepcopy"].codes.data_ptr() != moment.codes.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_at_random_is_right_on_average(kind):
    x, rounds = made((4, 64), kind), 2000
    often = x.repeat(rounds, 1)  # rows share nothing
    moment = Moment.quantize(often, kind, 32)
    moment.matrix().write(often, torch.rand(often.shape))
    values = moment.dequantize().view(rounds, 4, 64)
    below, above = values.amin(0), values.amax(0)
    spread = (above - below).double()
    # The mean of so many draws between two values is within 5 standard errors of x.
    error = (values.double().mean(0) - x.double()).abs()
    assert bool((error <= 5 * 0.5 * spread / math.sqrt(rounds) + 1e-5 * x.abs()).all())
    inside = x.abs() < x.abs().view(4, 2, 32).amax(2).repeat_interleave(32, 1)
    assert float((spread > 0)[inside].float().mean()) > 0.9
    if kind == "float8_expanded":
        assert bool((below[x > 0] > 0).all()), "a second moment became 0"
