"""The model: LLaMA-3's sizes, causal attention, and linear layers that float8 takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.measuring.shapes import LLAMA3_8B
from benchmarks.models.llama import MODELS, SIZES, LanguageModel, Llama, rotary_table, rotate

TINY = SIZES["tiny"]


def tiny() -> Llama:
    return Llama(TINY).bfloat16()


def test_its_products_are_those_of_llama_3_8b():
    with torch.device("meta"):
        block = Llama(SIZES["8b"]).blocks[0]
    layers = (
        block.attention.wqkv,
        block.attention.wo,
        block.feed_forward.w13,
        block.feed_forward.w2,
    )
    assert [(layer.in_features, layer.out_features) for layer in layers] == [
        (shape.K, shape.N) for shape in LLAMA3_8B
    ]
    assert SIZES["8b"].batch * SIZES["8b"].tokens == LLAMA3_8B[0].M


def test_a_token_sees_only_what_came_before():
    model = tiny()
    h = torch.randn(1, TINY.tokens, TINY.hidden, dtype=torch.bfloat16)
    changed = h.clone()
    changed[:, 100:] += 1
    before, after = model(h), model(changed)
    assert torch.equal(before[:, :100], after[:, :100])
    assert not torch.equal(before[:, 100:], after[:, 100:])


def test_attention_sees_distances_and_not_places():
    table = rotary_table(16, 8)
    q, k = torch.randn(2, 1, 1, 1, 8)
    turned_q, turned_k = (rotate(z.expand(1, 1, 16, 8), table)[0, 0] for z in (q, k))
    scores = turned_q @ turned_k.t()
    assert torch.allclose(scores.diagonal(-3), scores[3, 0].expand(13), atol=1e-5)
    assert torch.allclose(turned_q.norm(dim=1), q.norm().expand(16), atol=1e-5)


def test_every_parameter_gets_a_gradient():
    model = tiny()
    h = torch.randn(1, TINY.tokens, TINY.hidden, dtype=torch.bfloat16)
    model(h).square().mean().backward()
    assert [name for name, p in model.named_parameters() if not p.grad.norm() > 0] == []


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama2-7b", 6.74), ("llama2-70b", 68.98), ("llama3-8b", 8.03), ("llama3-70b", 70.55)],
)
def test_whole_models_have_the_published_numbers_of_parameters(name, billions):
    with torch.device("meta"):
        one, two = (LanguageModel(replace(MODELS[name], blocks=blocks)) for blocks in (1, 2))
    first, second = (sum(p.numel() for p in model.parameters()) for model in (one, two))
    total = first + (MODELS[name].blocks - 1) * (second - first)
    assert total / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_whole_model_learns_from_every_parameter():
    model = LanguageModel(TINY).bfloat16()
    tokens, targets = torch.randint(TINY.vocabulary, (2, 1, 16))
    model.stack.rotary = rotary_table(16, TINY.head_dim).bfloat16()
    loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    unseen = [name for name, p in model.named_parameters() if not p.grad.float().norm() > 0]
    assert unseen == []
