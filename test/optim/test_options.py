"""What is refused says which parameter, what is wrong with it, and what to do instead."""

import pytest
import torch
from torch import nn

from float8 import E4M3, Blockwise, Float8Tensor
from float8.optim import SGD, Adam, AdamW, Lion, Muon


def weight(*shape, **kwargs):
    return nn.Parameter(torch.randn(*shape, **kwargs))


def in_blocks():
    return Float8Tensor.from_high_precision(torch.randn(8, 8), E4M3, Blockwise(1, 4))


def with_transposed_copy():
    x = Float8Tensor.from_high_precision(torch.randn(8, 16), E4M3)
    data_t = x.float8_data.t().contiguous()
    return Float8Tensor(x.float8_data, x.scale, x.block, x.dtype, data_t)


# (error, optimizer, options, what the message says)
ROWS = [
    (ValueError, AdamW, {"amsgrad": True}, "amsgrad must be one of False"),
    (ValueError, AdamW, {"lr": -1.0}, r"lr must be in \[0, inf\), got -1"),
    (ValueError, AdamW, {"lr": torch.tensor(float("nan"))}, "lr must be in .*got nan"),
    (ValueError, AdamW, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
    (ValueError, Adam, {"weight_decay": -1.0}, "weight_decay"),
    (ValueError, AdamW, {"first_moment": "float16"}, "first_moment"),
    (ValueError, AdamW, {"second_moment": "fp8"}, "float8, float16, float32, got 'fp8'"),
    (ValueError, AdamW, {"group_size": 0}, r"group_size must be in \[1"),
    (ValueError, AdamW, {"state_rounding": "up"}, "auto, nearest, stochastic, got 'up'"),
    (ValueError, SGD, {"nesterov": True, "dampening": 0.5}, "nesterov"),
    (ValueError, Lion, {"betas": (-0.1, 0.9)}, "betas must be in"),
    (TypeError, AdamW, {"momentum": 0.9}, "AdamW has no options momentum"),
    (TypeError, Lion, {"second_moment": "float8"}, "Lion has no options second_moment"),
    (ValueError, Muon, {}, r"parameter 0 of shape \(2,\) .* is no matrix: .*\"adamw\""),
    (TypeError, Muon, {"kind": "sgd"}, "Muon has no options kind"),
    (ValueError, Muon, {"params": [{"params": [], "kind": "sgd"}]}, "muon, adamw, got 'sgd'"),
    (ValueError, Muon, {"adjust_lr_fn": "rms"}, "original, match_rms_adamw, got 'rms'"),
    (TypeError, Muon, {"params": [{"params": [], "use_muon": False}]}, "has use_muon, which"),
    (TypeError, Muon, {"params": [{"params": [], "betas": (0.9, 0.95)}]}, "has betas, which"),
    (
        TypeError,
        AdamW,
        {"params": [("w", weight(2, dtype=torch.float64))]},
        r"'w' .*float64",
    ),
    (TypeError, AdamW, {"params": [in_blocks()]}, r"block \(1, 4\).*granularity=Tensorwise"),
    (TypeError, AdamW, {"params": [with_transposed_copy()]}, "leave stale"),
]


@pytest.mark.parametrize(("error", "cls", "options", "message"), ROWS)
def test_options_and_parameters_are_refused(error, cls, options, message):
    with pytest.raises(error, match=message):
        cls(**{"params": [weight(2)], **options})


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW([table.weight])
    table(torch.tensor([1, 2])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"[Ss]parse"):
        optimizer.step()
    assert torch.equal(table.weight, before)


def test_a_model_that_became_float64_is_refused_before_anything_changes():
    """Its steps would be float32's, without an error."""
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.named_parameters())
    model.double()(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(TypeError, match=r"'weight' .*float64.*model.float\(\)"):
        optimizer.step()
    assert not optimizer.state
