"""`cached_weights` of experts: the same bits with fewer casts, and never those of another weight.

`test/distributed/test_cached_weights.py` has experts whose weights FSDP2 gathers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_all_bitwise
from meter import Casts
from mixtures import EXPERTS, HIDDEN, D, model, tokens
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

import float8
from float8 import cached_weights, convert_to_float8_training
from float8.config import RECIPES

DYNAMIC = [name for name in RECIPES if name not in ("delayed", "unit")]
ELEMENTS = {EXPERTS * D * HIDDEN, 2 * EXPERTS * D * HIDDEN}  # of the stacks
ENDS = torch.tensor([9, 9, 30, 37], dtype=torch.int32)


def convert(module, recipe="rowwise"):
    config = replace(RECIPES[recipe], pad_inner_dim=True)
    return convert_to_float8_training(module, config=config)


def microbatch(module, seed, *rest, run=None):
    """The output, and the gradient of the input."""
    x = tokens(seed=seed).detach().requires_grad_()
    out = (module if run is None else run)(x, *rest)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out))
    return [out.detach(), x.grad]


def train(module, *rest, write=lambda module: None, run=None):
    """Two steps of two microbatches; what they return, and the parameters."""
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.5), []
    for number in range(2):
        for i in range(2):
            seen += microbatch(module, 10 * number + i, *rest, run=run)
            write(module)
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *module.parameters()]


def casts_of_stacks(run):
    with Casts() as casts:
        run()
    return sum(size in ELEMENTS for size in casts.sizes)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_training_has_the_same_bits(recipe, in_place):
    net = convert(model(), recipe)
    with cached_weights(net, in_place=in_place):
        found = train(net)
    assert_all_bitwise(found, train(convert(model(), recipe)), recipe)


def test_a_stack_is_cast_once_per_step():
    net = convert(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    microbatch(net, 0)
    with cached_weights(net):
        assert casts_of_stacks(lambda: [microbatch(net, i) for i in range(3)]) == 0
        assert casts_of_stacks(optimizer.step) == 2
    assert casts_of_stacks(lambda: microbatch(net, 0)) == 4
    error = pytest.raises(ValueError, match=r"0\.experts: .*cached in torch.bfloat16")
    with cached_weights(net), torch.autocast("cpu", torch.float16), error:
        microbatch(net, 0)


def double(net):
    with torch.no_grad():
        net[0].experts.up.mul_(2)


def load(net):
    net.load_state_dict({name: 2 * p for name, p in net.state_dict().items()})


def replace_stack(net):
    net[0].experts.up = nn.Parameter(2 * net[0].experts.up.detach())


@pytest.mark.parametrize("write", [double, load, replace_stack])
def test_writes_are_seen(write):
    net = convert(model())
    with cached_weights(net):
        found = train(net, write=write)
    assert_all_bitwise(found, train(convert(model()), write=write), write.__name__)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    def recomputed(net):
        return train(net, run=lambda x: checkpoint(net, x, use_reentrant=reentrant))

    net = convert(model())
    with cached_weights(net):
        found = recomputed(net)
    assert_all_bitwise(found, recomputed(convert(model())), reentrant)


def test_a_compiled_forward_casts_no_stack():
    sizes = []

    def note(graph, inputs):
        casts = [n for n in graph.graph.nodes if n.target is torch.ops.float8.cast.default]
        sizes.append([n.args[0].meta["val"].numel() for n in casts])
        return make_boxed_func(graph)

    def trained(net, backend):
        experts = net[0].experts
        return train(experts, ENDS, run=torch.compile(experts, backend=backend, fullgraph=True))

    net = convert(model())
    with cached_weights(net):
        found = trained(net, aot_autograd(fw_compiler=note))
    assert len(sizes) == 2 and not ELEMENTS.intersection(*sizes)  # forward and backward, once
    assert_all_bitwise(found, trained(convert(model()), "aot_eager"), "compiled")


# --- stacks that a forward does not multiply as they are


class Square(nn.Module):
    """Experts of D x D, read by ``read``: (E, D, D) -> (E, K, N)."""

    def __init__(self, read):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, D, D, generator=torch.manual_seed(0)))
        self.read = read

    def forward(self, x, ends):
        return F.grouped_mm(x, self.read(self.stack), offs=ends)


class Turned(Square):
    """The same, of stacks (E, K, N)."""

    is_transposed = True


float8.register_experts(Square)
float8.register_experts(Turned)
READS = {  # and whether the cast fits
    "as they are": (Square, lambda stack: stack.mT, True),
    "transposed": (Square, lambda stack: stack, False),
    "turned": (Turned, lambda stack: stack, True),
    "turned and transposed": (Turned, lambda stack: stack.mT, False),
    "through views": (Square, lambda s: s.view(-1, D).view(s.shape).transpose(-1, -2), True),
    "reversed": (Square, lambda stack: stack.flip(0).mT, False),
    "shifted": (Square, lambda stack: torch.cat([stack[1:], stack[:1]]).mT, False),
    "doubled": (Square, lambda stack: (2 * stack).mT, False),
    "converted": (Square, lambda stack: stack.float().bfloat16().mT, False),
}


def both(kind, read):
    """What training returns with and without a cache, and the casts of stacks with one."""
    one, other = (convert(nn.ModuleDict({"it": kind(read).bfloat16()}))["it"] for _ in range(2))
    with cached_weights(one), Casts() as casts:
        found = microbatch(one, 0, ENDS)
    return found, microbatch(other, 0, ENDS), casts.sizes.count(EXPERTS * D * D)


@pytest.mark.parametrize("name", READS)
def test_other_reads_are_cast_in_each_call(name):
    kind, read, fits = READS[name]
    found, expected, casts = both(kind, read)
    assert_all_bitwise(found, expected, name)
    assert casts == (0 if fits else 2)
