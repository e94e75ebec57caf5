"""`unit_scale` on models of other libraries, and on models whose path varies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.transforms import unit_scale

VOCABULARY, WIDTH = 96, 64


def bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=VOCABULARY, intermediate_size=128, **sizes))


def gpt2(layers=2):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def llama(attention="sdpa"):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, intermediate_size=128, **sizes)
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def eager_llama():
    return llama("eager")


def masks(batch, length):
    padded = torch.ones(batch, length, dtype=torch.long)
    padded[0, -3:] = 0
    return {"none": None, "ones": torch.ones_like(padded), "padded": padded}


def first_tensor(output):
    return output[0]


@pytest.mark.parametrize("make", [bert, gpt2, llama, eager_llama])
def test_masks_of_any_kind_follow_one_another(make):
    """HuggingFace leaves out the arithmetic of a mask of ones: another path in each forward."""
    model, ids = unit_scale(make()).eval(), torch.randint(VOCABULARY, (4, 16))
    found = {}
    for kind, mask in [*masks(4, 16).items(), *masks(4, 16).items()]:
        out = first_tensor(model(ids, attention_mask=mask))
        out.square().mean().backward()
        found.setdefault(kind, []).append(out.detach())
    for kind, outputs in found.items():
        assert_bitwise(*outputs, kind)
    # Attention has a factor for causal masks, which HuggingFace drops for ones, and one for others.
    torch.testing.assert_close(found["none"][0], found["ones"][0])
    assert not torch.allclose(found["none"][0][0], found["padded"][0][0])


@pytest.mark.parametrize("make", [bert, gpt2, llama, eager_llama])
def test_weights_get_gradients_of_unit_scale(make):
    """Within a factor of 5: words repeat, and so do gradients; the plain model's are far off."""
    model, ids = unit_scale(make()), torch.randint(VOCABULARY, (16, 32))
    out = first_tensor(model(ids, attention_mask=torch.ones_like(ids)))
    out.backward(torch.randn_like(out))
    for name, parameter in model.named_parameters():
        # HuggingFace's eager attention multiplies scores of unit scale by 1/sqrt(d) once more.
        unused = ("wpe", "position", "token_type", "pooler", "q_proj", "k_proj")
        if parameter.dim() >= 2 and not any(part in name for part in unused):
            scale = parameter.grad.square().mean().sqrt().item()
            assert 1 / 5 < scale < 5, f"{name}: {scale}"


@pytest.mark.parametrize("need_weights", [False, True])
def test_arguments_may_be_one_tensor(need_weights):
    model, x = unit_scale(nn.MultiheadAttention(64, 4, batch_first=True)), torch.randn(2, 8, 64)
    out, _ = model(x, x, x, need_weights=need_weights)
    heads = U.linear(x, model.in_proj_weight).view(2, 8, 3, 4, -1)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    if need_weights:  # which torch divides by the root of the head's width
        a = U.matmul(U.softmax(U.matmul(q / 4, k.mT), -1), v)
    else:
        a = U.scaled_dot_product_attention(q, k, v)
    expected = U.linear(a.transpose(1, 2).reshape(x.shape), model.out_proj.weight)
    torch.testing.assert_close(out, expected)
    y = x.clone()
    torch.testing.assert_close(model(y, x, x, need_weights=need_weights)[0], out)


# --- models whose path varies


class Wavers(nn.Module):
    """Leaves out a layer, or not, by a number that it reads from a tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))

    def forward(self, x, gate):
        x = x + F.silu(self.a(x))
        if gate.sum() > 0:
            x = x + self.b(x)
        return x


def by_hand(model, x, is_open):
    """With two layers, as the first forward, an open one, has counted."""
    first, second = 1.0, 0.5**0.5
    r, s = U.residual_split(x, first)
    x = U.residual_add(U.silu(U.linear(r, model.a.weight, model.a.bias)), s, first)
    if is_open:
        r, s = U.residual_split(x, second)
        x = U.residual_add(U.linear(r, model.b.weight, model.b.bias), s, second)
    return x


def test_a_path_that_depends_on_values_has_the_numbers_of_its_own_hand_written_form():
    model, g = unit_scale(Wavers()), torch.randn(3, 6, dtype=torch.float64)
    for gate in (1.0, -1.0, 1.0):
        x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        inputs = [x, model.a.weight]
        found, expected = model(x, torch.tensor(gate)), by_hand(model, x, gate > 0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        mine, theirs = (torch.autograd.grad(y, inputs, g) for y in (found, expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
