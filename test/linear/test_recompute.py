"""`RecomputeCasts`: backward repeats casts of what is kept anyway, with the same bits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from assertions import assert_all_bitwise
from meter import saved_bytes
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from float8 import Float8Linear, convert_to_float8_training
from float8.kernels.recompute import TABLE, RecomputeCasts

TOKENS, WIDTH = 128, 256


def by(partition):
    """The backend that inductor's partition has, and no generated code."""

    def as_is(graph, inputs):
        return make_boxed_func(graph.forward)

    split = partial(partition, compiler="inductor")
    how = {"partition_fn": split, "decompositions": select_decomp_table}
    return aot_autograd(fw_compiler=as_is, bw_compiler=as_is, **how)


def step(run, model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def between(recipe="tensorwise"):
    """Layers whose inputs norm and SiLU make of what they keep."""
    layers = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
    model = nn.Sequential(*layers).bfloat16()
    return convert_to_float8_training(model, config=recipe)


def compiled(model, **how):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, **how)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_only_what_other_ops_need_is_kept_and_bits_stay(recipe):
    model, x = between(recipe), torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
    kept, results = [], []
    for partition in (partitioners.min_cut_rematerialization_partition, RecomputeCasts()):
        run = compiled(model, backend=by(partition))
        kept.append(saved_bytes(partial(run, x), model) / x.nbytes)
        results.append(step(run, model, x))
    assert kept == pytest.approx([1 + 2 + 1.5, 1 + 2], rel=0.03)  # x, SiLU's input; float8 of both
    assert_all_bitwise(*results)


def test_where_nothing_else_keeps_the_operand_its_copy_is_kept():
    layer, x = (
        Float8Linear(WIDTH, WIDTH, config="tensorwise").bfloat16(),
        torch.randn(TOKENS, WIDTH),
    )
    x = x.bfloat16().requires_grad_()
    run = compiled(layer, backend=by(RecomputeCasts()))
    assert saved_bytes(partial(run, x), layer) <= 0.55 * x.nbytes


@pytest.mark.slow
def test_inductor_takes_it_as_an_option():
    model, x = between(), torch.randn(TOKENS, WIDTH).bfloat16()
    twin = copy.deepcopy(model)
    expected = step(compiled(model), model, x)
    run = compiled(twin, options={"custom_partitioner_fn": RecomputeCasts()})
    assert_all_bitwise(step(run, twin, x), expected)
    x.requires_grad_()
    assert saved_bytes(partial(run, x), twin) == pytest.approx(3 * x.nbytes, rel=0.02)


def test_a_torch_without_the_table_is_refused(monkeypatch):
    monkeypatch.delattr(partitioners, TABLE)
    with pytest.raises(RuntimeError, match="compile without RecomputeCasts"):
        RecomputeCasts()
