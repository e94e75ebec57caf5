"""`visualiser`: plots a language model's scales in one call, on a batch of text.

For a model that takes other inputs, the three steps are ::

    tracked = track_scales(model)
    loss_of(tracked, batch).backward()
    plot(tracked.scales_graph())
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from float8.unit_scaling.analysis.scale_plot import plot
from float8.unit_scaling.transforms import track_scales

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IGNORED = -100  # the label that F.cross_entropy leaves out


def example_batch(
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    texts: Sequence[str] | None = None,
    seed: int = 1472,
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of token ids of real text.

    Args:
        tokenizer: anything with ``encode(text)`` that returns ids, or an object with ``ids``; None
            for the bytes of the text, 256 ids.
        batch_size: B, how many sequences.
        seq_len: S, how many tokens each.
        texts: where they are cut from, at random; the documentation of `torch.nn` if None.
        seed: of the choice.

    Returns:
        ``input_idxs``, ``attn_mask`` and ``labels``, each int64 (B, S) and contiguous. Labels are
        the ids, one to the left. Where a text is too short, the mask and the ids are 0 and the
        labels -100.

    Raises:
        ValueError: no text has two tokens.
    """
    texts = _documentation() if texts is None else texts
    encoded = [ids for text in texts if len(ids := _encode(tokenizer, text)) > 1]
    if not encoded:
        raise ValueError(f"none of {len(texts)} texts has two tokens: give longer texts")
    generator = torch.Generator().manual_seed(seed)
    cuts = [_cut(encoded, seq_len + 1, generator) for _ in range(batch_size)]
    padded = torch.tensor([[*ids, *[0] * (seq_len + 1 - len(ids))] for ids in cuts])
    is_text = torch.tensor([[i < len(ids) for i in range(seq_len + 1)] for ids in cuts])
    labels = torch.where(is_text, padded, IGNORED)
    batch = padded[:, :-1], is_text[:, :-1].long(), labels[:, 1:]
    inputs, mask, labels = (x.contiguous() for x in batch)  # models call .view(-1) on them
    return inputs, mask, labels


def visualiser(
    model: nn.Module,
    tokenizer: Any = None,
    batch_size: int = 8,
    seq_len: int = 64,
    backward: bool = True,
    texts: Sequence[str] | None = None,
    seed: int = 1472,
    **plot_kwargs: Any,
) -> Axes:
    """Plots the scales of a language model in one training step.

    Args:
        model: called as ``model(inputs, labels)`` with two int64 (B, S); returns the loss, or a
            tuple that ends with it. It stays as it is, gradients included.
        tokenizer, batch_size, seq_len, texts, seed: as for `example_batch`.
        backward: show the gradients too.
        **plot_kwargs: of `plot`.

    Returns:
        the axes of the plot.
    """
    inputs, _, labels = example_batch(tokenizer, batch_size, seq_len, texts, seed)
    parameter = next(model.parameters(), inputs)
    tracked = track_scales(model)
    output = tracked(inputs.to(parameter.device), labels.to(parameter.device))
    loss = output[-1] if isinstance(output, tuple) else output
    if backward:
        loss.backward()
    return plot(tracked.scales_graph(), **plot_kwargs)  # type: ignore[operator]


def _documentation() -> list[str]:
    """The docstrings of the classes of `torch.nn`."""
    classes = [value for _, value in sorted(vars(nn).items()) if inspect.isclass(value)]
    return [inspect.getdoc(cls) or "" for cls in classes]


def _encode(tokenizer: Any, text: str) -> list[int]:
    if tokenizer is None:
        return list(text.encode())
    found = tokenizer.encode(text)
    return list(getattr(found, "ids", found))


def _cut(encoded: list[list[int]], length: int, generator: torch.Generator) -> list[int]:
    ids = encoded[int(torch.randint(len(encoded), (), generator=generator))]
    start = int(torch.randint(max(len(ids) - length, 0) + 1, (), generator=generator))
    return ids[start : start + length]
