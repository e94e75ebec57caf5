"""Delayed scaling: the rule, step by step, and ``sync``, which applies it to all layers at once.

Scales follow TransformerEngine's rule over hundreds of random steps. `Published` is that rule in
plain Python, in float64 and in TransformerEngine's own layout: slot 0 of the history is the running
step; an update takes the maximum over all slots (or slot 0), rolls them by one and clears slot 0.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import shapes
import torch
from assertions import assert_all_bitwise
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    inspect,
)
from float8 import sync_float8_amax_and_scale_history as sync_history
from float8.config import RECIPES
from float8.distributed import sync
from float8.formats import E4M3, E5M2


def _model(layers=2, **settings):
    cast = CastConfig(scaling_type=ScalingType.DELAYED)
    config = Float8LinearConfig(
        cast, cast, cast, delayed_scaling=DelayedScalingConfig(**(settings or {"history_len": 4}))
    )
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    return convert_to_float8_training(model, config=config)


def _train(model, x, g, sync=sync_history):
    model(x).backward(g)
    if sync:
        sync(model)


def _data(scale=1.0):
    return torch.randn(8, 32) * scale, torch.randn(8, 32) * scale


def test_the_first_step_records_the_amaxes_and_sync_makes_them_scales():
    model, (x, g) = _model(1), _data()
    large = 10 * torch.randn(8, 32)
    for batch in (x, large, x):  # a step is the maximum over its microbatches
        _train(model, batch, g, sync=False)
    layer = model[0]
    amaxes = [large.abs().max(), layer.weight.abs().max(), g.abs().max()]
    for cast, amax in zip(layer.casts, amaxes, strict=True):
        assert cast.current_amax == amax
        assert cast.amax_history.count_nonzero() == 0 and cast.scale == 0
    sync_history(model)
    for cast, amax, largest in zip(layer.casts, amaxes, (448.0, 448.0, 57344.0), strict=True):
        assert cast.amax_history.tolist() == [amax.item(), 0, 0, 0]
        assert cast.scale.item() == pytest.approx(amax.item() / largest, rel=1e-6)
        assert cast.current_amax == 0


def test_until_an_operand_was_seen_outputs_are_those_of_dynamic_scaling_then_of_the_history():
    model, (x, g) = _model(1), _data(1e-6)
    dynamic = convert_to_float8_training(nn.Sequential(copy.deepcopy(model[0]).to_float()))
    sync_history(model)  # before any forward: nothing to scale by
    assert all(cast.scale == 0 and not cast.history_ready for cast in model[0].casts)
    assert torch.equal(model(x), dynamic(x))
    for each in (model, dynamic):
        _train(each, x, g)
    assert torch.equal(model[0].weight.grad, dynamic[0].weight.grad)
    assert all(cast.scale > 0 and cast.history_ready for cast in model[0].casts)
    small = x / 100  # not a power of two: the codes differ, because the scale does not follow
    assert not torch.equal(model(small), dynamic(small))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_amax_enters_as_zero_and_keeps_the_scale(bad):
    model, (x, g) = _model(1, history_len=1), _data()
    _train(model, x, g)
    scale = model[0].cast_input.scale.clone()
    x[3, 5] = bad
    out = model(x)
    assert out[3].isnan().all() and out[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    model(x.nan_to_num(0, 0)).backward(g)  # and a later microbatch does not hide it
    sync_history(model)
    assert model[0].cast_input.amax_history.tolist() == [0.0]
    assert torch.equal(model[0].cast_input.scale, scale)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_amaxes_are_recorded_in_training_with_grad_only(mode):
    model = _model(1).train(mode != "eval")
    with getattr(torch, mode, nullcontext)():
        model(torch.randn(8, 32))
    assert all(cast.current_amax == 0 for cast in model[0].casts)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_neither_gradients_nor_records(use_reentrant):
    plain, (x, g) = _model(), _data()
    _train(plain, x.requires_grad_(), g)
    plain.zero_grad()
    recomputed = copy.deepcopy(plain)
    _train(plain, x, g, sync=False)
    checkpoint(recomputed, x, use_reentrant=use_reentrant).backward(g)
    assert_all_bitwise(*([p.grad for p in m.parameters()] for m in (recomputed, plain)))
    assert_all_bitwise(recomputed.buffers(), plain.buffers())


def _same(x):
    return x


@pytest.mark.parametrize("way", ["plain", "hooks", "checkpoint"])
@pytest.mark.parametrize("first_step", [True, False])
def test_sync_between_forward_and_backward_is_an_error_that_says_so(first_step, way):
    """Under hooks of saved tensors torch compares no versions."""
    model, (x, g) = _model(1), _data()
    if not first_step:
        _train(model, x, g)
    run = partial(checkpoint, model, use_reentrant=False) if way == "checkpoint" else model
    is_hooked = way == "hooks"
    with saved_tensors_hooks(_same, _same) if is_hooked else nullcontext():
        out = run(x)
    sync_history(model)
    with pytest.raises(RuntimeError, match="sync_float8_amax_and_scale_history"):
        out.backward(g)


@pytest.mark.parametrize(
    ("sync", "rates", "is_warned"),
    [(sync_history, (0.1, 0.1), 0), (None, (0.1, 0.1), 1), (None, (0.0, 0.0), 0), (None, (), 0)],
)
def test_a_forgotten_sync_raises_one_warning_with_the_fix(sync, rates, is_warned):
    """Steps of another model's optimizer do not count, nor those with a rate of zero."""
    model, plain = _model(), nn.Sequential(nn.Linear(32, 32))
    optimizers = [torch.optim.SGD(plain.parameters())]
    optimizers += [torch.optim.SGD(model[i].parameters(), rate) for i, rate in enumerate(rates)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            _train(model, *_data(), sync)
            for optimizer in optimizers:
                optimizer.step()
    words = "sync_float8_amax_and_scale_history(model)"
    assert [words in str(warning.message) for warning in caught] == [True] * is_warned


def test_the_first_sync_of_layers_compares_ranks(monkeypatch):
    """In a group of one rank too, which may be the wrong one; and by layer, not by container."""
    asked = []
    check = lambda model, ranks, groups: asked.append(ranks)  # noqa: E731
    monkeypatch.setattr(sync, "compare_before_sync", check)
    dynamic = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sync_history(_model(), torch.distributed.new_group([0]))
        for model in (dynamic, dynamic, nn.ModuleList(dynamic)):
            sync_history(model)
    finally:
        torch.distributed.destroy_process_group()
    assert asked == [[0], [0, 1]]


def test_a_group_that_is_none_is_refused():
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        sync_history(_model(1), "nccl")


def test_a_compiled_sync_is_one_graph_while_casts_have_no_scale():
    torch.manual_seed(3)
    eager = _model(3, history_len=4)
    eager[1].eval()  # records no amax, and so has no scale
    compiled = copy.deepcopy(eager)
    graphs = CompileCounterWithBackend("aot_eager")
    sync = torch.compile(sync_history, backend=graphs, fullgraph=True)
    for step in range(4):
        x, g = torch.randn(16, 32) * 2**step, torch.randn(16, 32)
        for model, call in ((eager, sync_history), (compiled, sync)):
            model[1].train(step >= 3)
            _train(model, x, g, call)
        assert_all_bitwise(compiled.buffers(), eager.buffers(), step)
        ready = [[c.history_ready for c in layer.casts] for layer in compiled]
        assert ready == [[True] * 3, [step >= 3] * 3, [True] * 3]
    assert graphs.frame_count == 2  # before any scale, and after; one graph each


# --- the start of a training


class _Residual(nn.Module):
    """A block whose last projection starts at zero, before a small head."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 48, bias=False)
        nn.init.zeros_(self.down.weight)
        nn.init.normal_(self.head.weight, std=0.001)

    def forward(self, x):
        return self.head(nn.functional.rms_norm(x + self.down(self.up(x).relu()), (32,)))


def _saturation_in_first_steps(config):
    """The worst cast of each of the steps 1 and 2: the saturated fraction of a grad_output."""
    torch.manual_seed(0)
    model = convert_to_float8_training(_Residual(), config=config)
    optimizer, worst = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(3):
        x, targets = torch.randn(64, 32), torch.randint(48, (64,))
        with inspect(model) as report:
            nn.functional.cross_entropy(model(x), targets).backward()
        gradients = [c for c in report.casts if c.operand == "grad_output"]
        worst.append(max(c.saturated or 0.0 for c in gradients))
        optimizer.step()
        optimizer.zero_grad()
        sync_history(model)
    return worst[1:]


def test_gradients_that_grow_at_the_start_do_not_saturate(full_start, monkeypatch):
    """Adam's first step makes the head 20 times larger, and with it the gradients before it."""
    assert max(_saturation_in_first_steps(RECIPES["delayed"])) == 0
    monkeypatch.setattr(sync, "DYNAMIC_STEPS", 1)  # a scale after the first step: the fault
    assert max(_saturation_in_first_steps(RECIPES["delayed"])) > 0.5


@pytest.mark.parametrize(("history_len", "first"), [(1, 1), (4, 4), (16, 16), (20, 16)])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_cast_is_dynamic_until_its_history_is_full(full_start, history_len, first, algo):
    model = _model(1, history_len=history_len, amax_compute_algo=algo)
    cast = model[0].cast_input
    for step in range(1, 20):
        cast.current_amax.fill_(step)
        sync_history(model)
        assert cast.history_ready == (step >= first)
        assert cast.scale.item() == (pytest.approx(step / E4M3.max) if step >= first else 0)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("saved", [2, 6])
def test_a_run_that_resumes_at_its_start_has_the_same_scales(full_start, saved, algo):
    """Also of a layer that trains in every other step, whose history is never full of amaxes."""
    rule = {"history_len": 4, "amax_compute_algo": algo}
    models = [_model(2, **rule), _model(2, **rule)]
    for step in range(9):
        for model in models:
            for layer in model[: 1 + step % 2]:
                for cast in layer.casts:
                    cast.current_amax.fill_(step + 1)
            sync_history(model)
        if step == saved:
            models[1] = _model(2, **rule)
            models[1].load_state_dict(models[0].state_dict())
        a, b = ([(c.scale.item(), c.history_ready) for x in m for c in x.casts] for m in models)
        assert a == b
    assert all(ready for _, ready in a)


# --- the rule

FLOAT32_MAX, SMALLEST_SCALE = torch.finfo(torch.float32).max, 2.0**-126
ROUNDING = 2.0**-22  # two roundings to float32 of 2^-24 each, and then some


class Published:
    """One operand as TransformerEngine keeps it; ``factor`` multiplies, as its ``scale`` does."""

    def __init__(self, config: DelayedScalingConfig, format_max: float, pow2: bool) -> None:
        self.config, self.format_max, self.pow2 = config, format_max, pow2
        self.history, self.factor = [0.0] * config.history_len, 1.0

    def step(self, amax: float) -> None:
        nonfinite = math.inf if self.config.remember_nonfinite else 0.0
        self.history[0] = amax if math.isfinite(amax) else nonfinite
        found = max(self.history) if self.config.amax_compute_algo == "max" else self.history[0]
        self.history = [*self.history[1:], self.history[0]]
        self.history[0] = 0.0
        if 0 < found < math.inf:
            factor = min(self.format_max / found / 2.0**self.config.margin, 1 / SMALLEST_SCALE)
            if self.pow2:  # its releases before 1.0: 2^(floor(log2(max / amax)) - margin)
                factor = 2.0 ** (math.frexp(factor)[1] - 1)
            if 1 / factor <= FLOAT32_MAX:  # ours alone: there such a factor is 0, or nearly so
                self.factor = factor

    @property
    def newest_first(self) -> list[float]:
        """The past steps that count in the next update."""
        return self.history[:0:-1]


def an_amax(draw: random.Random) -> float:
    kind = draw.random()
    if kind < 0.25:
        specials = [math.inf, math.nan, 2.0**-149, 2.0**-126, FLOAT32_MAX, 2.0**127, 448.0]
        return draw.choice([0.0, 0.0, 0.0, *specials])
    return float(torch.tensor(math.ldexp(1 + draw.random(), draw.randint(-130, 126))))


CASES = shapes.pairs(
    length=[1, 2, 5, 64],
    algo=["max", "most_recent"],
    margin=[-3, 0, 1, 12, 32],
    remembers=[True, False],
    fmt=[E4M3, E5M2],
    pow2=[False, True],
).args[1]


def test_hundreds_of_steps_follow_the_published_rule(full_start):
    """Every case at once: one sync per step serves them all."""
    layers, published, draws = nn.ModuleList(), [], []
    for seed, (*rule, fmt, pow2) in enumerate(CASES):
        how = CastConfig(
            ScalingType.DELAYED, target_dtype=fmt.dtype, scale_format=shapes.FLOAT32_SCALES[pow2]
        )
        delayed = DelayedScalingConfig(*rule)
        config = Float8LinearConfig(
            cast_config_grad_output=how, delayed_scaling=delayed, enable_amax_init=False
        )
        layers.append(Float8Linear(1, 1, config=config))
        published.append(Published(delayed, fmt.max, pow2))
        draws.append(random.Random(seed))
    for step in range(300):
        for layer, rule, draw in zip(layers, published, draws, strict=True):
            amax = an_amax(draw)
            layer.cast_grad_output.current_amax.fill_(amax)
            rule.step(amax)
        sync_history(layers)
        for layer, rule, case in zip(layers, published, CASES, strict=True):
            cast, replay = layer.cast_grad_output, f"step {step} of {case}"
            assert cast.amax_history.tolist()[: len(rule.newest_first)] == rule.newest_first, replay
            assert cast.scale.item() == pytest.approx(1 / rule.factor, rel=ROUNDING, abs=0), replay
