"""The decomposition of multi-head attention computes as torch does, to rounding in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from float8.unit_scaling.transforms.transformed import Mode, Transform, transformed

E, HEADS, B, T, S = 12, 3, 2, 5, 7


class Opens(Transform):
    """Changes nothing: functions that hide others are opened."""

    depth = 1

    def mode(self, model, args, kwargs):
        return Mode({})


def attention(**options):
    made = nn.MultiheadAttention(E, HEADS, dtype=torch.float64, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def masks():
    hidden = torch.rand(T, S) < 0.3
    hidden[:, 0] = False
    per_head = torch.randn(B * HEADS, T, S, dtype=torch.float64)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1, -2:] = True
    return {
        "attn_mask": [None, hidden, torch.randn(T, S, dtype=torch.float64), per_head],
        "key_padding_mask": [None, padding],
        "need_weights": [False, True],
    }


def assert_same(ours, torchs, inputs, **options):
    for mine, theirs in zip(ours(*inputs, **options), torchs(*inputs, **options), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.parametrize(
    "case",
    [{}, {"kdim": 4, "vdim": 8}, {"bias": False, "add_zero_attn": True}, {"add_bias_kv": True}],
    ids=str,
)
def test_masks_and_weights_are_torchs(case):
    torchs = attention(batch_first=True, **case)
    ours = transformed(torchs, Opens())
    sizes = [(T, E), (S, case.get("kdim", E)), (S, case.get("vdim", E))]
    inputs = [torch.randn(B, *size, dtype=torch.float64) for size in sizes]
    options = masks()
    for values in itertools.product(*options.values()):
        assert_same(ours, torchs, inputs, **dict(zip(options, values, strict=True)))
    for given in (inputs, [x[0] for x in inputs]):  # the second without a batch
        assert_same(ours, torchs, given, average_attn_weights=False)
