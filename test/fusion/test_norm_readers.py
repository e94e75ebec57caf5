"""Who reads a norm: names that stand for what they say, graphs that are read and never guessed."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.fusion.norm_readers import declared, traced

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


class Optional(Model):
    def forward(self, x, mask=None, *, bias=None):
        return self.body(self, x, mask, bias)


def adds(m, x):
    h = m.norm(x)
    return m.a(h) + h


# A forward with two ways, and what is known of it.
BRANCHES = {
    "both read": (lambda m, x, *_: (m.a if m.training else m.b)(m.norm(x)), ["a", "b"]),
    "one calls": (lambda m, x, *_: m.a(m.norm(x)) if m.training else m.a(x), ["a"]),
    "one reads": (lambda m, x, mask, _: m.a(m.norm(x)) if mask is None else m.norm(x).dim(), ["a"]),
    "training": (
        lambda m, x, *_: m.a(m.norm(x)) if m.training else adds(m, x),
        "its result is read by add, in eval mode",
    ),
    "gradients": (
        lambda m, x, *_: m.a(m.norm(x)) if torch.is_grad_enabled() else adds(m, x),
        "its result is read by add, in eval mode",
    ),
    "a given argument": (
        lambda m, x, mask, _: adds(m, x) if mask is not None else m.a(m.norm(x)),
        "its result is read by add",
    ),
    "a missing argument": (
        lambda m, x, mask, bias: m.a(m.norm(x)) * mask if bias is not None else adds(m, x),
        "its result is read by add, called without optional arguments",
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_forward_is_followed_in_every_mode_with_and_without_optional_arguments(name):
    forward, expected = BRANCHES[name]
    model = Optional(forward)
    assert traced(model, ["norm"], is_leaf)["norm"] == expected
    assert model.training


def test_a_result_that_outlives_the_forward_may_be_read_by_anybody():
    kept = []

    def in_a_list(m, x):
        kept.append([m.norm(x)])
        return m.a(kept[-1][0])

    def in_an_attribute(m, x):
        m.b.seen = h = m.norm(x)
        return m.a(h)

    def in_a_cycle(m, x):  # which nobody has
        box = {"h": m.norm(x)}
        box["itself"] = box
        return m.a(box["h"])

    assert readers_of(in_a_list).startswith("its result is kept beyond the forward")
    assert readers_of(in_an_attribute).startswith("its result is kept beyond the forward")
    assert readers_of(in_a_cycle) == ["a"]


def test_calls_that_a_trace_does_not_show_are_no_guesses():
    """A forward past the module, or in a module of torch's; one that replaced a block's own."""
    directly = readers_of(lambda m, x: m.a(m.norm(x)) + m.norm.forward(x))
    assert directly.endswith("TypeError: the forward of a norm or layer is called past the module")

    model = Model(lambda m, x: m.a(m.norm(x)) + m.encoder(x))
    layer = nn.TransformerEncoderLayer(D, 1, D)
    model.encoder = nn.TransformerEncoder(layer, 1, model.norm, enable_nested_tensor=False)
    found = traced(model, ["norm"], is_leaf)["norm"]
    assert found == "it is a part of encoder too, which is not looked into"

    model = Model(READERS["one"][0])
    model.forward = lambda x: adds(model, x)
    found = traced(nn.ModuleList([model]), ["0.norm"], is_leaf)["0.norm"]
    assert found.endswith("TypeError: its forward was replaced by a function")


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
    """A forward that keeps what it saw, counts in a buffer and draws; a hook that sees proxies."""

    def forward(m, x):
        m.seen = m.a(m.norm(x))
        m.count.add_(1)
        return m.seen * float(torch.rand(()))

    model = Model(forward)
    model.register_buffer("count", torch.zeros(()))
    before, state = {id(p) for p in model.parameters()}, torch.get_rng_state()
    assert traced(model, ["norm"], is_leaf)["norm"] == ["a"]
    assert torch.equal(torch.get_rng_state(), state)
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
