"""Every operation on a `Float8Tensor` keeps all metadata, or says why it cannot run.

One table of operations, run eagerly, under ``inference_mode``, compiled, on fake tensors and on
meta. An operation that moves values about must move the same ones as on the plain tensor, bit for
bit, and leave scale, block, format, dtype, device and strides consistent with each other. For each
operation the table says which granularities have no way to do it; those must say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_same_float8
from shapes import Case
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import E5M2, Blockwise, Float8Tensor, Rowwise, ScaleFormat, Tensorwise

SHAPE = (6, 24)
GRANULARITIES = {
    "tensorwise": Tensorwise(),
    "rowwise": Rowwise(),
    "1x8": Blockwise(1, 8),
    "1x8 E8M0": Blockwise(1, 8),
    "3x4": Blockwise(3, 4),
    "4x16": Blockwise(4, 16),  # which does not divide
}
ROWS = {"3x4", "4x16"}  # blocks of several rows
SPLIT = {"1x8", "1x8 E8M0", "3x4", "4x16"}  # rows of several scales
ALL = set(GRANULARITIES)


@dataclass(frozen=True)
class Op:
    """An operation on a (6, 24) tensor, and the granularities that refuse it."""

    run: Callable[[Tensor], Tensor]
    refused: frozenset[str] | set[str] = frozenset()
    dtype: torch.dtype = torch.bfloat16


# Operations that move values about: they give on the plain tensor what they give here.
VIEWS = {
    "view flat": Op(lambda q: q.view(-1), ALL - {"tensorwise"}),
    "view": Op(lambda q: q.view(2, 3, 24), ROWS),
    "view merges": Op(lambda q: q.view(2, 3, 24).view(6, 24), ROWS),
    "view adds a dimension": Op(lambda q: q.view(1, 6, 24)),
    "view splits columns": Op(lambda q: q.view(6, 3, 8), ALL - {"tensorwise"}),
    "reshape copies": Op(lambda q: q.t().reshape(4, 36), ALL - {"tensorwise"}),
    "reshape of 3d copies": Op(lambda q: q.view(2, 3, 24).transpose(0, 1).reshape(6, 24), ROWS),
    "flatten": Op(lambda q: q.flatten(), ALL - {"tensorwise"}),
    "unsqueeze": Op(lambda q: q.unsqueeze(0)),
    "unsqueeze and flatten": Op(lambda q: q.unsqueeze(0).view(-1), ALL - {"tensorwise"}),
    "unsqueeze and merge": Op(lambda q: q.unsqueeze(0).view(6, 24)),
    "unsqueeze last": Op(lambda q: q.unsqueeze(-1)),
    "t": Op(lambda q: q.t()),
    "transpose": Op(lambda q: q.transpose(0, 1)),
    "transpose of 3d": Op(lambda q: q.view(1, 6, 24).transpose(0, 2)),
    "permute": Op(lambda q: q.permute(1, 0)),
    "permute of 3d": Op(lambda q: q.view(1, 6, 24).permute(-1, 0, 1)),
    "slice rows": Op(lambda q: q[1:4], ROWS),
    "slice blocks of rows": Op(lambda q: q[3:], {"4x16"}),
    "slice columns": Op(lambda q: q[:, 8:16], {"4x16"}),
    "slice odd columns": Op(lambda q: q[:, 1:7], SPLIT),
    "slice to the partial block": Op(lambda q: q[:, 16:]),
    "slice to empty": Op(lambda q: q[:0]),
    "slice negative": Op(lambda q: q[-2:], {"3x4"}),
    "slice steps": Op(lambda q: q[::2], ROWS),
    "slice of a transpose": Op(lambda q: q.t()[8:16], {"4x16"}),
    "select row": Op(lambda q: q[2], ROWS),
    "select column": Op(lambda q: q[:, 3], SPLIT),
    "split": Op(lambda q: q.split(3)[1], {"4x16"}),
    "split unevenly": Op(lambda q: q.split(4)[1], {"3x4"}),
    "split columns by sizes": Op(lambda q: q.split([16, 8], dim=-1)[1]),
}
COPIES = {
    "detach": Op(lambda q: q.detach()),
    "alias": Op(torch.ops.aten.alias),
    "data": Op(lambda q: q.data),
    "clone": Op(lambda q: q.clone()),
    "clone to contiguous": Op(lambda q: q.t().clone(memory_format=torch.contiguous_format)),
    "contiguous transpose": Op(lambda q: q.t().contiguous()),
    "to its own dtype": Op(lambda q: q.to(torch.bfloat16)),
    "to a copy": Op(lambda q: q.to(torch.bfloat16, copy=True)),
    "zeros_like": Op(torch.zeros_like),
    "zeros_like in float32": Op(
        lambda q: torch.zeros_like(q, dtype=torch.float32), dtype=torch.float32
    ),
    "new_zeros": Op(lambda q: q.new_zeros(5, 7)),
    "new_zeros in another rank": Op(lambda q: q.new_zeros(5), ALL),
    "copy_": Op(lambda q: torch.zeros_like(q).copy_(q)),
    "copy_ of a row": Op(lambda q: torch.zeros_like(q).copy_(q[:1]), ROWS),
}
# What has no plain counterpart: the values are not defined, or change with the dtype.
OTHERS = {
    "to float32": Op(lambda q: q.to(torch.float32), dtype=torch.float32),
    "type_as": Op(lambda q: q.type_as(torch.empty(0)), dtype=torch.float32),
    "empty_like": Op(torch.empty_like),
    "empty_like in float16": Op(
        lambda q: torch.empty_like(q, dtype=torch.float16), dtype=torch.float16
    ),
    "new_empty": Op(lambda q: q.new_empty(3, 40)),
}
MOVES = {**VIEWS, **COPIES}
EVERY_OP = {**MOVES, **OTHERS}
EVERY_GRANULARITY = pytest.mark.parametrize("name", GRANULARITIES)


def example(name: str, seed: int = 1) -> Float8Tensor:
    """A tensor none of whose metadata is the default, and no two of whose scales are equal."""
    x = Case(SHAPE, torch.bfloat16, fill="wide", seed=seed).make()
    return Float8Tensor.from_high_precision(
        x, E5M2, GRANULARITIES[name], scale_format=scale_format(name)
    )


def scale_format(name: str) -> ScaleFormat:
    if name == "rowwise":
        return ScaleFormat.POWER_OF_TWO
    return ScaleFormat.E8M0_FLOOR if name == "1x8 E8M0" else ScaleFormat.FLOAT32


def assert_consistent(q: Float8Tensor, dtype: torch.dtype, replay) -> None:
    """Block, scale, data and strides describe one tensor of the kind that `example` makes."""
    assert isinstance(q, Float8Tensor), replay
    assert (q.dtype, q.format) == (dtype, E5M2), replay
    assert (q.shape, q.stride()) == (q.float8_data.shape, q.float8_data.stride()), replay
    assert q.storage_offset() == q.float8_data.storage_offset(), replay
    scales = scale_format(replay[1])
    assert (q.scale.dtype, q.scale_format) == (scales.dtype, scales), replay
    assert tuple(q.scale.shape) == oracle.scale_shape(tuple(q.shape), q.block), replay
    assert q.device == q.float8_data.device == q.scale.device, replay


def assert_kept(q: Float8Tensor, op: str, replay) -> None:
    """The operation gives what it gives for the plain values, or refuses in words."""
    case = EVERY_OP[op]
    if replay[1] in case.refused:
        with pytest.raises(ValueError, match=r"call \.dequantize\(\)|one extent per"):
            case.run(q)
        return
    result = case.run(q)
    assert_consistent(result, case.dtype, replay)
    if op in MOVES:
        expected = case.run(q.dequantize())
        assert_bitwise(result.dequantize(), expected, replay)
        assert result.stride() == expected.stride() or expected.numel() == 0, replay


@pytest.mark.parametrize("op", EVERY_OP)
def test_every_operation_keeps_all_metadata(op):
    """Of a parameter and under inference mode too."""
    for name in GRANULARITIES:
        outside = example(name)
        assert_kept(outside, op, (op, name))
        assert_kept(nn.Parameter(outside, requires_grad=False), op, (op, name, "parameter"))
        with torch.inference_mode():
            assert_kept(outside, op, (op, name, "made outside"))
            assert_kept(example(name), op, (op, name, "made inside"))


def allowed(name: str, without: set[str] = frozenset()) -> dict[str, Op]:
    return {op: c for op, c in EVERY_OP.items() if name not in c.refused and op not in without}


@EVERY_GRANULARITY
def test_fake_and_meta_tensors_take_every_operation(name):
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(example(name))
        for op, case in allowed(name).items():
            result = case.run(fake)
            assert_consistent(result, case.dtype, (op, name))
            assert result.shape == case.run(example(name)).shape
    meta = example(name).to("meta")
    for op, case in allowed(name, {"type_as"}).items():  # which moves it to a device
        result = case.run(meta)
        assert_consistent(result, case.dtype, (op, name))
        assert result.device.type == "meta"


@EVERY_GRANULARITY
def test_every_operation_compiles_in_one_graph(name):
    cases = allowed(name, {op for op in OTHERS if "empty" in op})

    def every(q):
        return {op: case.run(q) for op, case in cases.items()}

    compiled = torch.compile(every, fullgraph=True, backend="aot_eager")(example(name))
    for op, expected in every(example(name)).items():
        assert_same_float8(compiled[op], expected, (op, name))
        assert_consistent(compiled[op], cases[op].dtype, (op, name))
