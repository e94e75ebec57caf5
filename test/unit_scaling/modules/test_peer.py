"""The modules of the package ``unit-scaling`` compute the same from the same weights.

What differs on purpose is in docs/migrating/unit_scaling.md and ``test_differences.py``.
"""

from __future__ import annotations

import pytest
import torch

import float8.unit_scaling as uu

# Not "unit_scaling", which without the package is this folder's parent.
pytest.importorskip("unit_scaling.parameter")
import unit_scaling as theirs

IDS = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(0))
MODULES = {
    "linear": (lambda lib: lib.Linear(9, 5, bias=True), (4, 3, 9)),
    "linear, free": (lambda lib: lib.Linear(9, 5, constraint=None), (4, 9)),
    "linear, gmean": (lambda lib: lib.Linear(9, 5, constraint="gmean"), (4, 9)),
    "readout": (lambda lib: lib.LinearReadout(9, 5, bias=True), (4, 9)),
    "layer norm": (lambda lib: lib.LayerNorm(9, elementwise_affine=True), (4, 3, 9)),
    "rms norm": (lambda lib: lib.RMSNorm((3, 9), elementwise_affine=True), (4, 3, 9)),
    "gelu": (lambda lib: lib.GELU(mult=2.0, constraint="gmean"), (4, 9)),
    "silu": (lambda lib: lib.SiLU(mult=0.5), (4, 9)),
    "softmax": (lambda lib: lib.Softmax(-1, mult=2.0), (4, 9)),
    "mlp": (lambda lib: lib.MLP(6, 3), (4, 3, 6)),
    "attention": (lambda lib: lib.MHSA(8, 2, True), (2, 9, 8)),
    "attention, odd heads": (lambda lib: lib.MHSA(9, 3, False, mult=2.0), (2, 9, 9)),
    "layer": (lambda lib: lib.TransformerLayer(8, 2, 0.3, 0.7, is_causal=False), (2, 9, 8)),
}
DECODER = {"hidden_size": 8, "vocab_size": 20, "layers": 2, "heads": 2}


def both(make):
    torch.manual_seed(0)
    mine, other = make(uu), make(theirs)
    for p in mine.parameters():
        torch.nn.init.normal_(p)
    other.load_state_dict(mine.state_dict())
    return mine, other


def run(model, x, g):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(g(y))
    return y.detach(), x.grad, *[p.grad for p in model.parameters()]


@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES)
def test_the_same_weights_give_the_same_results(make, shape):
    mine, other = both(make)
    x = torch.randn(shape)

    def g(y):
        return torch.randn(y.shape, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(run(mine, x, g), run(other, x, g), rtol=1e-4, atol=1e-5)


def test_the_same_decoder_has_the_same_loss_and_gradients():
    mine, other = both(lambda lib: lib.TransformerDecoder(**DECODER))
    losses = mine.loss(IDS), other.loss(IDS)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    theirs_grads = [p.grad for p in other.parameters()]
    torch.testing.assert_close([p.grad for p in mine.parameters()], theirs_grads)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("constraint", [None, "to_output_scale"])
def test_the_same_learning_rates_and_decays(name, constraint):
    options = {"lr": 0.3, "weight_decay": 0.1}
    if name == "SGD":
        options["readout_constraint"] = constraint
    mine, other = both(lambda lib: lib.TransformerDecoder(**DECODER))
    found, expected = (
        {
            id(p): (g["lr"], g["weight_decay"])
            for g in getattr(lib.optim, name)(list(m.parameters()), **options).param_groups
            for p in g["params"]
        }
        for lib, m in ((uu, mine), (theirs, other))
    )
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        assert found[id(p)] == pytest.approx(expected[id(q)])
