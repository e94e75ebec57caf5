"""nanoGPT's model: its published size, causality, and the head that is the embedding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models.nanogpt import CHARACTERS, NanoGPT
from benchmarks.quality.contenders import contender
from float8 import Float8Linear
from scripts.training.gpt import VOCABULARY, Sizes

SMALL = Sizes(layers=2, width=32, heads=2, context=16)


def test_it_has_the_parameters_that_nanogpt_reports():
    model = NanoGPT(CHARACTERS)
    count = sum(p.numel() for p in model.parameters()) - model.positions.weight.numel()
    # "number of parameters: 10.65M", without positions and with 65 characters.
    assert count - (VOCABULARY - 65) * CHARACTERS.width == 10_646_784


def logits_of(model, tokens):
    found = []
    handle = model.head.register_forward_hook(lambda module, args, out: found.append(out))
    model(tokens, tokens)
    handle.remove()
    return found[0]


def test_a_position_sees_those_before_it_and_their_order():
    torch.manual_seed(0)
    model = NanoGPT(SMALL)
    tokens = torch.randint(VOCABULARY, (1, 16))
    later = tokens.clone()
    later[0, 9] = (tokens[0, 9] + 1) % VOCABULARY
    before, after = logits_of(model, tokens), logits_of(model, later)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 10], after[0, 10])
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(before[0, 9], logits_of(model, swapped)[0, 9], rtol=1e-4)


@pytest.mark.parametrize("name", ["naive", "unit_bf16", "unit"])
def test_the_head_stays_the_embedding_in_every_contender(name):
    torch.manual_seed(0)
    model = contender(name, NanoGPT(SMALL)).model
    assert model.head.weight is model.embedding.weight
    assert not isinstance(model.head, Float8Linear)
    in_float8 = [m for m in model.modules() if isinstance(m, Float8Linear)]
    assert len(in_float8) == (4 * SMALL.layers if name == "naive" else 0)


def test_unit_scale_makes_its_activations_and_gradients_near_1():
    torch.manual_seed(0)
    model = contender("unit_bf16", NanoGPT(Sizes(2, 128, 2, 64))).model
    tokens = torch.randint(VOCABULARY, (8, 64))
    scales = {}

    def note(name, out):
        scales[name] = out.std().item()
        out.register_hook(lambda grad: scales.update({f"{name}'s gradient": grad.std().item()}))

    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, linear in linears.items():
        linear.register_forward_hook(lambda _, args, out, name=name: note(name, out))
    model(tokens, tokens).backward()
    # A quarter to four: two of the eighteen powers of two that E4M3 has.
    far = {name: scale for name, scale in scales.items() if not 1 / 4 < scale < 4}
    assert len(scales) == 2 * len(linears)
    assert not far
