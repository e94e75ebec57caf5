"""An outlier of SwiGLU, planted in a trained GPT without changing what the model computes.

A channel i of SwiGLU computes ``h_i = silu(g x) (u x)`` from row g of the gate's weight and row u
of the up projection's. Under weight decay the two rows of a channel align and grow in long
trainings, u -> g or -g ("Scaling FP8 training to trillion-token LLMs", arXiv 2409.12517, sections 3
and 4). For aligned rows h_i is about ``(g x)^2`` where g x > 0, and small elsewhere: few tokens
along g give values far above all others, and ``down`` reads them in one tensor with the rest.

This takes trillions of tokens, so it is made here, in the first block, where x tells best which
byte a token is:

1. `plant`: the channel that contributes least gets ``g = u = a v`` and a column of zeros in
   ``down``. v is the ridge regression of labels +1 (the token is the given byte) and -1 (it is
   another) on x, both classes with half of the weight. a makes the largest h_i that of the rest.
2. A short training lets ``down`` learn to use the channel.
3. `grow`: both rows are multiplied by ``2^(k/2)`` and the column by ``2^-k``. Then h_i grows by
   ``2^k``, and the output of ``down`` stays what it is, up to the rounding of silu to a rectifier.
   The byte decides in how many batches the outlier occurs.

`hold` keeps planted weights as they are in the steps of an optimizer. Without it AdamW changes each
element of the column by about the learning rate in a step, which the outlier multiplies by ``2^k``:
the loss of a bf16 model would jump too, and the study would not be about float8 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.training import corpus, gpt

RIDGE = 1e-3  # of the mean of the covariance's diagonal
WINDOWS = 64  # that contain the byte; three times as many are drawn from all of the text


def windows(text: corpus.Corpus, byte: int, *, seed: int, context: int) -> Tensor:
    """Tokens (4 x WINDOWS, T): some windows with the byte, and some from anywhere.

    Raises:
        ValueError: the training text lacks the byte.
    """
    generator = torch.Generator().manual_seed(seed)
    places = (text.train[context:-context] == byte).nonzero().flatten() + context
    if not len(places):
        raise ValueError(f"the training text has no byte {chr(byte)!r}: no token could be found")
    chosen = places[torch.randint(len(places), (WINDOWS,), generator=generator)]
    starts = chosen - torch.randint(context, (WINDOWS,), generator=generator)
    elsewhere = torch.randint(len(text.train) - context, (3 * WINDOWS,), generator=generator)
    starts = torch.cat((starts, elsewhere))
    return text.train[starts[:, None] + torch.arange(context)].long()


@torch.no_grad()
def plant(model: gpt.GPT, tokens_BT: Tensor, byte: int) -> int:
    """Plant a channel that answers to a byte; its largest value is that of the others.

    Args:
        model: in high precision.
        tokens_BT: some of the byte and many others, as `windows` gives them.
        byte: that the channel answers to.

    Returns:
        The channel.
    """
    swiglu = _swiglu(model)
    x_NC, h_NF = _operands(model, tokens_BT)
    v_C = _direction(x_NC, (tokens_BT == byte).flatten())
    channel = int((h_NF.square().mean(0).sqrt() * swiglu.down.weight.norm(dim=0)).argmin())
    a = h_NF.abs().max().sqrt() / (x_NC @ v_C).max()
    gate, up = _rows(swiglu, channel)
    swiglu.gate_up.weight[gate] = a * v_C
    swiglu.gate_up.weight[up] = a * v_C
    swiglu.down.weight[:, channel] = 0
    return channel


@torch.no_grad()
def grow(model: gpt.GPT, channel: int, exponent: int) -> None:
    """Multiply the planted channel by ``2^exponent``, and divide what reads it by the same."""
    swiglu = _swiglu(model)
    for row in _rows(swiglu, channel):
        swiglu.gate_up.weight[row] *= 2.0 ** (exponent / 2)
    swiglu.down.weight[:, channel] *= 2.0**-exponent


def hold(model: gpt.GPT, channel: int, *, column: bool) -> None:
    """Set the gradients of the planted rows to zero, and those of the column too if asked for."""
    swiglu = _swiglu(model)
    rows = _rows(swiglu, channel)
    swiglu.gate_up.weight.register_hook(lambda g: g.index_fill(0, torch.tensor(rows), 0))
    if column:
        swiglu.down.weight.register_hook(lambda g: g.index_fill(1, torch.tensor([channel]), 0))


def _swiglu(model: gpt.GPT) -> gpt.SwiGLU:
    block = model.blocks[0]
    assert isinstance(block, gpt.Block)
    assert isinstance(block.feed_forward, gpt.SwiGLU)
    return block.feed_forward


def _rows(swiglu: gpt.SwiGLU, channel: int) -> tuple[int, int]:
    """The channel's rows of the gate's and the up projection's weight, which are one matrix."""
    return channel, swiglu.down.in_features + channel


def _operands(model: gpt.GPT, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """What ``gate_up`` and ``down`` read, one row for each token."""
    swiglu = _swiglu(model)
    found: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, -2)))
        for layer in (swiglu.gate_up, swiglu.down)
    ]
    model(tokens_BT, tokens_BT)
    for handle in handles:
        handle.remove()
    x_NC, h_NF = found
    return x_NC, h_NF


def _direction(x_NC: Tensor, fires_N: Tensor) -> Tensor:
    """The ridge regression of labels +1 and -1, each class with half of the weight."""
    x, fires = x_NC.double(), fires_N.double()
    weight_N = 0.5 * (fires / fires.sum() + (1 - fires) / (1 - fires).sum())
    weighted_CN = (x * weight_N[:, None]).t()
    covariance = weighted_CN @ x
    ridge = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=x.dtype)
    v: Tensor = torch.linalg.solve(covariance + ridge, weighted_CN @ (2 * fires - 1))
    return v.to(x_NC.dtype)
