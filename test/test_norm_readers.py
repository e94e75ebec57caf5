"""Who reads a norm: names that stand for what they say, graphs that are read and never guessed."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.norm_readers import declared, traced

D = 8


def is_leaf(module):
    return isinstance(module, nn.LayerNorm)


class Model(nn.Module):
    """A norm, two layers, and a forward that is given."""

    def __init__(self, forward):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def readers_of(forward, fqn="norm"):
    return traced(Model(forward), [fqn], is_leaf)[fqn]


READERS = {
    "one": (lambda m, x: m.a(m.norm(x)), ["a"]),
    "two": (lambda m, x: m.a(h := m.norm(x)) + m.b(h), ["a", "b"]),
    "by keyword": (lambda m, x: m.a(input=m.norm(x)), ["a"]),
    "two calls": (lambda m, x: m.a(m.norm(x)) + m.b(m.norm(-x)), ["a", "b"]),
    "only its shape is asked": (
        lambda m, x: m.a(h := m.norm(x)).reshape(h.shape[0], h.size(1)).to(h.dtype),
        ["a"],
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_are_seen(name):
    forward, expected = READERS[name]
    assert readers_of(forward) == expected


OTHERS = {
    "is read by dropout": lambda m, x: m.a(F.dropout(m.norm(x))),
    "is read by view": lambda m, x: m.a(m.norm(x).view(-1, D)),
    "is read by add": lambda m, x: m.a(h := m.norm(x)) + h,
    "whoever called the model": lambda m, x: (m.a(h := m.norm(x)), h),
    "is read by multiply|is read by mul": lambda m, x: m.a(m.norm(x)) + m.b(m.norm(x) * 2),
    "nobody reads": lambda m, x: m.a(x + 0 * m.norm(x).shape[0]),
    "no forward calls it": lambda m, x: m.a(x),
    "is read by getitem": lambda m, x: m.a(m.norm(x)[0]),
    "is read by linear": lambda m, x: F.linear(m.norm(x), m.a.weight),
    "TraceError: symbolically traced variables": lambda m, x: m.a(m.norm(x)) if x.sum() else x,
    "RuntimeError: no$": lambda m, x: (_ for _ in ()).throw(RuntimeError("no")),
}  # fmt: skip


@pytest.mark.parametrize("reason", OTHERS)
def test_everything_else_has_a_reason(reason):
    found = readers_of(OTHERS[reason])
    assert isinstance(found, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


def test_blocks_are_traced_where_the_whole_model_cannot_be():
    def asks_for_values(m, x):
        return m.block(x) if x.sum() else m.other(x)

    model = Model(asks_for_values)
    model.block, model.other = Model(READERS["two"][0]), Model(OTHERS["is read by add"])
    found = traced(model, ["norm", "block.norm", "other.norm"], is_leaf)
    assert found["block.norm"] == ["block.a", "block.b"]
    assert found["other.norm"].startswith("its result is read by add")
    assert found["norm"].startswith("the model cannot be traced by torch.fx: TraceError")


def test_of_a_shared_norm_every_call_is_seen_or_none_counts():
    def forward(m, x):
        return m.a(m.norm(x)) + m.block(x)

    model = Model(forward)
    model.block = Model(OTHERS["is read by add"])
    model.block.norm = model.norm
    assert traced(model, ["norm"], is_leaf)["norm"].startswith("its result is read by add")
    model.body = lambda m, x: forward(m, x) if x.sum() else x  # of the block alone one sees less
    model.block.body = READERS["one"][0]
    assert "cannot be traced" in traced(model, ["norm"], is_leaf)["norm"]
    apart = nn.ModuleDict({"first": Model(READERS["one"][0]), "second": model.block})
    apart["second"].norm = apart["first"].norm
    found = traced(apart, ["first.norm"], is_leaf)["first.norm"]
    assert found == "second.norm is the same module, and outside of the block seen"


class Opaque(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) else -x


def test_an_untraceable_sequence_is_in_order():
    norm = nn.LayerNorm(D)
    model = nn.Sequential(Opaque(), norm, nn.Linear(D, D), nn.LayerNorm(D))
    found = traced(model, ["1", "3"], is_leaf)
    assert found["1"] == ["2"]
    assert found["3"] == "its result leaves the nn.Sequential that it is in"
    model.append(norm)
    assert traced(model, ["1"], is_leaf)["1"].startswith("its result leaves")


def test_the_model_itself_is_left_as_it_is():
    """A forward that keeps what it saw and counts in a buffer; a hook that would see proxies."""

    def forward(m, x):
        m.seen = m.norm(x)
        m.count.add_(1)
        return m.a(m.seen)

    model = Model(forward)
    model.register_buffer("count", torch.zeros(()))
    before = {id(p) for p in model.parameters()}
    assert traced(model, ["norm"], is_leaf)["norm"] == ["a"]
    assert not hasattr(model, "seen") and model.count == 0
    assert {id(p) for p in model.parameters()} == before
    outer = nn.Sequential(model, nn.Linear(D, D))
    model.register_forward_hook(lambda *_: pytest.fail("called"))
    assert traced(outer, ["0.norm"], is_leaf)["0.norm"] == ["0.a"]  # of the block alone


def test_a_model_that_cannot_be_copied_has_that_reason():
    model = Model(READERS["one"][0])
    model.lock = threading.Lock()
    assert "cannot be copied for tracing: TypeError" in traced(model, ["norm"], is_leaf)["norm"]


# --- names

NAMES = [f"layers.{i}.{part}" for i in (0, 1, 10) for part in ("norm", "at.q", "at.k", "up")]


def test_stars_stand_for_one_part_on_both_sides():
    found = declared(NAMES, {"layers.*.norm": ["layers.*.at.q", "layers.*.at.k"]})
    assert found == {
        f"layers.{i}.norm": [f"layers.{i}.at.q", f"layers.{i}.at.k"] for i in (0, 1, 10)
    }
    assert declared(NAMES, {"norm": "up"}, "layers.1.") == {"layers.1.norm": ["layers.1.up"]}
    assert declared(NAMES, {"layers.1*.norm": "layers.1*.up"}).keys() == {
        "layers.1.norm",
        "layers.10.norm",
    }


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ({"layers.*.nrm": "up"}, ValueError, r"no norm 'layers.\*.nrm'; did you mean 'layers."),
        ({"layers.*": "up"}, ValueError, r"no norm 'layers.\*'"),
        ({"layers.1.norm": "layers.1.upp"}, ValueError, r"no layer \(of layers.1.norm\) 'layers.1"),
        ({"layers.1.norm": "layers.*.up"}, ValueError, "'layers.*.up' has more stars"),
        ({"layers.1.norm": [3]}, TypeError, r"norm pairs are names, got 'layers.1.norm': \[3\]"),
    ],
)
def test_names_that_mean_nothing_are_refused(pairs, error, message):
    with pytest.raises(error, match=message):
        declared(NAMES, pairs)
