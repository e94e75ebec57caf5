"""Pruned graphs lose what they should, stay connected, and leave the whole one as it was."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.transforms.prune import (
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
)
from float8.unit_scaling.transforms.track_scales import track_scales


class Net(nn.Module):
    """Views, slices, integers and sums."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.linear = nn.Linear(64, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        flat = x.flatten(0, -1).view(x.shape)
        scores = F.softmax(self.linear(flat), dim=-1)
        top = scores.argmax(-1).unsqueeze(-1)
        a, b = torch.split(x, 32, -1)
        return torch.cat([a, b, torch.gather(x, -1, top)], dim=-1)


def graph():
    torch.manual_seed(1)
    model = track_scales(Net())
    y = model(torch.randint(0, 50, (8, 16)))
    y.backward(torch.randn_like(y))
    return model.scales_graph()


def named(g):
    return {node.name: node for node in g.nodes}


def test_what_is_no_float_tensor_goes_and_its_users_read_its_float_input():
    whole = graph()
    before = list(named(whole))
    left = named(prune_non_float_tensors(whole))
    assert set(before) - set(left) == {"tokens", "argmax", "unsqueeze", "split"}
    assert left["gather"].args == (left["embedding"], -1, left["softmax"])
    assert left["getitem"].args[0] is left["embedding"]
    assert left["embedding"].args[0] is None
    assert list(named(whole)) == before
    assert left["softmax"].meta["metrics"] is named(whole)["softmax"].meta["metrics"]


def test_what_keeps_the_scale_goes_and_what_changes_it_stays():
    left = named(prune_same_scale_tensors(prune_non_float_tensors(graph())))
    assert "view" not in left
    assert left["linear"].args[0] is left["flatten"]
    # What is gathered or split has another scale; flatten has one of the embedding's four users.
    assert {"embedding", "flatten", "linear", "softmax", "gather", "getitem", "cat"} <= set(left)


def test_selected_functions_and_methods_go():
    whole = graph()
    left = named(prune_selected_nodes(whole, [F.softmax, torch.Tensor.flatten, "view"]))
    assert not {"softmax", "flatten", "view"} & set(left)
    assert left["linear"].args[0] is left["embedding"]
    assert "softmax" in named(whole)
