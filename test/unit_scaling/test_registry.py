"""`float8.unit_scaling.registry`: torch's functions and ours, one entry each."""

import inspect

import pytest
import torch
from assertions import assert_bitwise
from torch.nn import functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry


@pytest.fixture(autouse=True)
def restored_map():
    before = dict(registry.torch_map)
    yield
    registry.torch_map.clear()
    registry.torch_map.update(before)


def mine(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize(
    ("torch_function", "ours"),
    [
        (F.linear, U.linear),
        (torch.matmul, U.matmul),
        (F.conv1d, U.conv1d),
        (F.gelu, U.gelu),
        (F.silu, U.silu),
        (F.softmax, U.softmax),
        (torch.softmax, U.softmax),
        (F.dropout, U.dropout),
        (F.layer_norm, U.layer_norm),
        (F.rms_norm, U.rms_norm),
        (F.embedding, U.embedding),
        (torch.add, U.add),
        (F.scaled_dot_product_attention, U.scaled_dot_product_attention),
        (F.cross_entropy, U.cross_entropy),
        (F.mse_loss, U.mse_loss),
    ],
)
def test_a_function_of_torch_has_its_unit_scaled_one(torch_function, ours):
    assert U.torch_map[torch_function] is ours


@pytest.mark.parametrize(
    "torch_function",
    [f for f in registry.torch_map if inspect.isfunction(f)],
    ids=lambda f: f.__name__,
)
def test_ours_takes_every_argument_of_torchs(torch_function):
    ours = inspect.signature(registry.torch_map[torch_function]).parameters
    theirs = inspect.signature(torch_function).parameters
    assert set(theirs) <= set(ours)
    positional = [name for name, p in theirs.items() if p.default is p.empty]
    assert list(ours)[: len(positional)] == positional


def test_torchs_keywords_reach_ours():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert_bitwise(registry.handler(torch.matmul)(input=a, other=b), U.matmul(a, b))
    assert_bitwise(registry.handler(F.linear)(input=a, weight=b.t()), U.linear(a, b.t()))
    assert registry.handler(F.linear) is U.linear


def test_an_entry_can_be_added_and_removed():
    U.register(torch.sin, mine, keywords={"input": "x"})
    assert U.torch_map[torch.sin] is mine
    assert registry.handler(torch.sin)(1, input=2) == ((1,), {"x": 2})
    U.unregister(torch.sin)
    assert torch.sin not in U.torch_map
    with pytest.raises(KeyError, match="not registered"):
        U.unregister(torch.sin)
    with pytest.raises(KeyError, match="register one"):
        registry.handler(torch.sin)


def test_an_entry_is_replaced_only_on_request():
    with pytest.raises(ValueError, match=r"silu is registered already, as silu; pass replace=True"):
        U.register(F.silu, mine)
    assert U.torch_map[F.silu] is U.silu
    U.register(F.silu, mine, replace=True)
    assert U.torch_map[F.silu] is mine


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="'silu'"):
        U.register("silu", mine)


def test_an_unknown_name_of_the_functions_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'glue'"):
        U.glue  # noqa: B018
