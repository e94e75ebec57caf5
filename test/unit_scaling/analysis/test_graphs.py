"""Tables and plots have the graph's own numbers, and batches of text are cut at random."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.analysis import (
    example_batch,
    plot,
    visualiser,
)
from float8.unit_scaling.analysis.graphs import graph_to_rows
from float8.unit_scaling.transforms import Metrics, prune_non_float_tensors, track_scales

# --- tables


def tracked(backward=True):
    torch.manual_seed(1)
    model = track_scales(nn.Sequential(nn.Linear(5, 3, bias=False), nn.ReLU()))
    y = model(torch.randn(4, 5))
    if backward:
        y.backward(torch.randn(4, 3))
    return model.scales_graph()


def test_each_tensor_has_two_rows_in_the_order_of_the_calls():
    graph = tracked()
    rows = graph_to_rows(graph)
    assert [(r["layer"], r["direction"], r["tensor type"], r["weight tensor"]) for r in rows] == [
        (name, direction, kind, kind.endswith("w"))
        for name, letter in (("input_1", "x"), ("_0_weight", "w"), ("linear", "x"), ("relu", "x"))
        for direction, kind in (("fwd", letter), ("bwd", f"grad_{letter}"))
    ]
    nodes = {node.name: node for node in graph.nodes}
    for row in rows:
        data = getattr(nodes[row["layer"]].meta["metrics"], row["direction"])
        for name in Metrics.names():
            assert row[Metrics.get_full_name(name)] == getattr(data, name)


# --- plots


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x):
        h = F.relu(self.up(x)).view(-1)
        return h * 0.0, h.argmax(), h.square().sum()


@pytest.fixture(scope="module")
def graph():
    pytest.importorskip("matplotlib")
    torch.manual_seed(1)
    model = track_scales(Net())
    model(torch.randn(4, 8))[-1].backward()
    return model.scales_graph()


def rows(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def dots(axes):
    """(row, value) of every dot of a pass, from what is drawn."""
    found = {"forward": set(), "backward": set()}
    for line in axes.get_lines():
        if " pass, " in str(line.get_label()):
            pairs = zip(line.get_ydata(), line.get_xdata(), strict=True)
            found[line.get_label().split()[0]] |= {(int(y), float(x)) for y, x in pairs}
    return found


def test_every_scale_is_a_dot_in_its_tensors_row(graph):
    axes = plot(graph, prune_same_scale=False)
    nodes = [n for n in prune_non_float_tensors(graph).nodes if n.op != "output"]
    assert rows(axes) == [n.name for n in nodes]
    expected = {"forward": set(), "backward": set()}
    for row, node in enumerate(nodes):
        metrics = node.meta["metrics"]
        if metrics.fwd.mean_abs > 0:
            expected["forward"].add((row, metrics.fwd.mean_abs))
        if metrics.bwd is not None and metrics.bwd.mean_abs > 0:
            expected["backward"].add((row, metrics.bwd.mean_abs))
    assert dots(axes) == expected
    assert axes.get_xscale() == "log"


def test_another_metric_is_drawn_by_either_name(graph):
    for name in ("std", "standard deviation"):
        assert plot(graph, metric=name).get_xlabel() == "standard deviation"
    with pytest.raises(KeyError):
        plot(graph, metric="scale")


# --- batches of text


def test_a_batch_is_bytes_of_the_text_and_labels_are_the_next_ones():
    text = "abcdefghijklmnopqrstuvwxyz"
    inputs, mask, labels = example_batch(None, 5, 7, texts=[text])
    assert inputs.shape == mask.shape == labels.shape == (5, 7)
    assert {x.dtype for x in (inputs, mask, labels)} == {torch.int64}
    for row, following in zip(inputs.tolist(), labels.tolist(), strict=True):
        assert bytes(row).decode() in text
        assert following == [byte + 1 for byte in row]
    assert mask.all()
    assert all(x.is_contiguous() for x in (inputs, mask, labels))


def test_short_texts_are_padded_out_of_the_mask_and_out_of_the_loss():
    inputs, mask, labels = example_batch(None, 1, 5, texts=["abc"])
    assert inputs.tolist() == [[97, 98, 99, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 0, 0]]
    assert labels.tolist() == [[98, 99, -100, -100, -100]]
    assert example_batch(None, 1, 1, texts=["ab"])[2].tolist() == [[98]]
    assert example_batch(None, 9, 5, texts=["abcdef"])[1].all()  # each is cut at the beginning


def test_tokenizers_of_either_kind_encode_the_text():
    words = types.SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])
    boxed = types.SimpleNamespace(encode=lambda text: types.SimpleNamespace(ids=[1, 2, 3]))
    assert example_batch(words, 1, 3, ["to be or not"])[0].tolist() == [[2, 2, 2]]
    assert example_batch(boxed, 1, 2, ["anything"])[2].tolist() == [[2, 3]]


class Bigram(nn.Module):
    def __init__(self, returns="both"):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.returns = returns

    def forward(self, inputs, labels):
        logits = self.head(self.embed(inputs))
        # nanoGPT's spelling: view takes contiguous labels only
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return {"both": (logits, loss), "loss": loss, "logits": logits}[self.returns]


@pytest.mark.parametrize("returns", ["both", "loss"])
def test_a_model_is_plotted_in_one_call_and_stays_as_it_is(returns):
    model = Bigram(returns)
    axes = visualiser(model, batch_size=2, seq_len=16, title="bigram")
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert {"embed_weight", "linear", "cross_entropy"} <= set(names)
    assert axes.get_title() == "bigram"
    assert all(p.grad is None for p in model.parameters())
    assert "backward pass, tensor" in axes.get_legend_handles_labels()[1]
