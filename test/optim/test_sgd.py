"""SGD with momentum: with float32 states torch's own; in 8 bits its trajectory."""

import pytest
import torch
from optim_training import make, train

from float8.optim import SGD
from float8.optim.moment import Moment


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "dampening": 0.3},
        {"nesterov": True, "maximize": True, "momentum": 0.7},
    ],
)
def test_with_float32_states_it_is_torch(options):
    a, b = make(), make()
    options = {"momentum": 0.9, "lr": 0.02, **options}
    train(a, SGD(a.parameters(), **options, first_moment="float32"), 15)
    train(b, torch.optim.SGD(b.parameters(), **options), 15)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_training_ends_where_float32_states_end_it():
    a, b = make(), make()
    ours = SGD(a.parameters(), lr=0.1, min_size=64)
    loss = train(a, ours, 100)
    exact = train(b, torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9), 100)
    assert abs(loss - exact) < 0.01 * exact
    state = ours.state[a[0].weight]["momentum_buffer"]
    assert isinstance(state, Moment)
    assert state.kind == "float8"


def test_a_long_memory_is_rounded_at_random():
    def rounds(**options):
        optimizer = SGD([torch.nn.Parameter(torch.randn(2, 64))], **options)
        return optimizer._is_stochastic(optimizer.param_groups[0], "momentum_buffer")

    assert not rounds(momentum=0.9)
    assert rounds(momentum=0.99)
    assert not rounds(momentum=0.99, state_rounding="nearest")
    assert rounds(momentum=0.5, state_rounding="stochastic")
