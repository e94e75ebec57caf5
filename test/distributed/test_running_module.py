"""The module that is running, by its name."""

from __future__ import annotations

from torch import nn

from float8.distributed.token_exchange import innermost_module


class Asks(nn.Module):
    def forward(self):
        return innermost_module()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.asks = Asks()

    def forward(self):
        return self.asks(), innermost_module()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self):
        return self.layers[1]()


def test_a_module_is_named_from_the_outermost_one():
    assert Outer()() == ("layers.1.asks (Asks)", "layers.1 (Inner)")
    assert Inner()() == ("asks (Asks)", "Inner")


def test_outside_of_modules_there_is_none():
    assert innermost_module() == ""
