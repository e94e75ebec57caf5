"""``sync`` turns the amaxes of a step into the scales of the next, for all layers at once."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    sync,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def _model(layers=2, **delayed):
    cast = CastConfig(scaling_type=ScalingType.DELAYED)
    config = Float8LinearConfig(
        cast, cast, cast, delayed_scaling=DelayedScalingConfig(**(delayed or {"history_len": 4}))
    )
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    return convert_to_float8_training(model, config=config)


def _backward(model, x, g):
    model(x).backward(g)


def test_the_first_step_records_the_amaxes_and_sync_makes_them_scales():
    model = _model(1)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    _backward(model, x, g)
    layer = model[0]
    amaxes = [x.abs().max(), layer.weight.abs().max(), g.abs().max()]
    for cast, amax in zip(layer.casts, amaxes, strict=True):
        assert cast.current_amax == amax
        assert cast.amax_history.count_nonzero() == 0 and cast.scale == 0
    sync_float8_amax_and_scale_history(model)
    for cast, amax, fmt_max in zip(
        layer.casts, amaxes, (E4M3_MAX, E4M3_MAX, E5M2_MAX), strict=True
    ):
        assert cast.amax_history.tolist() == [amax.item(), 0, 0, 0]
        assert cast.scale.item() == pytest.approx(amax.item() / fmt_max, rel=1e-6)
        assert cast.current_amax == 0


def test_until_the_first_sync_outputs_are_those_of_dynamic_scaling_then_of_the_history():
    model = _model(1)
    plain = nn.Sequential(nn.Linear(32, 32))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "cast" not in k})
    dynamic = convert_to_float8_training(plain)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    assert torch.equal(model(x), dynamic(x))
    _backward(model, x, g)
    assert torch.equal(model(x), dynamic(x))
    sync_float8_amax_and_scale_history(model)
    small = x / 100  # not a power of two: the codes differ, because the scale does not follow
    assert not torch.equal(model(small), dynamic(small))


def test_a_step_is_the_maximum_over_its_microbatches():
    model = _model(1)
    small, large, g = torch.randn(8, 32), torch.randn(8, 32) * 10, torch.randn(8, 32)
    for x in (small, large, small):
        _backward(model, x, g)
    sync_float8_amax_and_scale_history(model)
    assert model[0].cast_input.amax_history[0] == large.abs().max()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_history_algorithm_and_margin(algo, margin):
    model = _model(1, history_len=3, amax_compute_algo=algo, margin=margin)
    g, peaks = torch.randn(8, 32), [8.0, 1.0, 2.0, 4.0, 1.0]
    for step, peak in enumerate(peaks):
        _backward(model, torch.randn(8, 32).clamp(-1, 1) * 0.5 + 0.5 * peak * torch.eye(8, 32), g)
        recorded = model[0].cast_input.current_amax.item()
        sync_float8_amax_and_scale_history(model)
        history = model[0].cast_input.amax_history
        assert history[0].item() == recorded
        amax = recorded if algo == "most_recent" else history.max().item()
        assert len(history) == 3 and history.count_nonzero() == min(step + 1, 3)
        assert model[0].cast_input.scale.item() == pytest.approx(
            2**margin * amax / E4M3_MAX, rel=1e-6
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_amax_enters_as_zero_and_keeps_the_scale(bad):
    model = _model(1, history_len=1)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    _backward(model, x, g)
    sync_float8_amax_and_scale_history(model)
    scale = model[0].cast_input.scale.clone()
    x[3, 5] = bad
    out = model(x)
    assert out[3].isnan().all() and out[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    out.backward(g)
    sync_float8_amax_and_scale_history(model)
    assert model[0].cast_input.amax_history.tolist() == [0.0]
    assert torch.equal(model[0].cast_input.scale, scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_remembered_infinity_keeps_scales_for_as_long_as_it_counts(bad, algo):
    model = _model(1, history_len=2, remember_nonfinite=True, amax_compute_algo=algo)
    cast, found = model[0].cast_input, []
    for amax in (4.0, bad, 2.0, 3.0):
        cast.current_amax.fill_(amax)
        sync_float8_amax_and_scale_history(model)
        found.append(round(cast.scale.item() * E4M3_MAX, 3))
    assert found == ([4.0, 4.0, 4.0, 3.0] if algo == "max" else [4.0, 4.0, 2.0, 3.0])


def test_scales_are_found_anew_after_an_interval_and_histories_by_every_sync():
    model = _model(1, history_len=2, interval=3)
    cast, found = model[0].cast_input, []
    for step in range(7):
        cast.current_amax.fill_(step + 1)
        sync_float8_amax_and_scale_history(model)
        assert cast.amax_history.tolist() == [step + 1, step]
        found.append(round(cast.scale.item() * E4M3_MAX, 3))
    assert found == [1, 1, 1, 4, 4, 4, 7]


def test_a_scale_that_is_due_waits_for_an_amax_and_no_longer():
    model = _model(1, history_len=1, interval=3)
    cast, found = model[0].cast_input, []
    for amax in (0.0, 0.0, 5.0, 6.0, 7.0, float("inf"), 8.0, 9.0, 10.0, 11.0):
        cast.current_amax.fill_(amax)
        sync_float8_amax_and_scale_history(model)
        found.append(round(cast.scale.item() * E4M3_MAX, 3))
    assert found == [0, 0, 5, 5, 5, 5, 8, 8, 8, 11]


def test_an_interval_counts_in_one_compiled_graph():
    eager = _model(2, history_len=2, interval=2)
    compiled = copy.deepcopy(eager)
    graphs = CompileCounter()
    for step in range(6):
        for model in (eager, compiled):
            for i, cast in enumerate(c for layer in model for c in layer.casts):
                cast.current_amax.fill_(step + i + 1)
        sync_float8_amax_and_scale_history(eager)
        if step == 0:
            sync_float8_amax_and_scale_history(compiled)  # which scales are ready is asked once
        else:
            torch.compile(sync_float8_amax_and_scale_history, backend=graphs, fullgraph=True)(
                compiled
            )
        for a, b in zip(eager.buffers(), compiled.buffers(), strict=True):
            assert torch.equal(a, b)
    assert graphs.frame_count == 1


def test_an_operand_that_was_never_seen_stays_dynamic_until_it_is():
    model = _model(1)
    dynamic = convert_to_float8_training(nn.Sequential(copy.deepcopy(model[0]).to_float()))
    sync_float8_amax_and_scale_history(model)  # before any forward: nothing to scale by
    assert all(cast.scale == 0 and not cast.history_ready for cast in model[0].casts)
    x, g = torch.randn(8, 32) * 1e-6, torch.randn(8, 32) * 1e-6
    assert torch.equal(model(x), dynamic(x))
    _backward(model, x, g)
    _backward(dynamic, x, g)
    assert torch.equal(model[0].weight.grad, dynamic[0].weight.grad)
    sync_float8_amax_and_scale_history(model)
    assert all(cast.scale > 0 and cast.history_ready for cast in model[0].casts)


def test_a_frozen_layer_in_eval_mode_stays_dynamic():
    model = _model(2)
    model[0].requires_grad_(False).eval()
    nn.init.normal_(model[0].weight, std=1e-5)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    first = model[0](x)
    for _ in range(2):
        _backward(model, x, g)
        sync_float8_amax_and_scale_history(model)
    assert torch.equal(model[0](x), first)
    assert model[1].cast_input.history_ready


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_amaxes_are_recorded_in_training_with_grad_only(mode):
    model, x = _model(1), torch.randn(8, 32)
    if mode == "eval":
        model.eval()(x)
    else:
        with getattr(torch, mode)():
            model(x)
    assert all(cast.current_amax == 0 for cast in model[0].casts)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_neither_gradients_nor_records(use_reentrant):
    plain = _model()
    x, g = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)
    _backward(plain, x, g)
    sync_float8_amax_and_scale_history(plain)
    plain.zero_grad()
    recomputed = copy.deepcopy(plain)
    _backward(plain, x, g)
    checkpoint(recomputed, x, use_reentrant=use_reentrant).backward(g)
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), recomputed.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first_step", [True, False])
def test_sync_between_forward_and_backward_is_an_error_that_says_so(first_step):
    model = _model(1)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    if not first_step:
        _backward(model, x, g)
        sync_float8_amax_and_scale_history(model)
    out = model(x)
    sync_float8_amax_and_scale_history(model)
    with pytest.raises(RuntimeError, match="sync_float8_amax_and_scale_history"):
        out.backward(g)


def test_without_delayed_casts_sync_does_nothing(caplog):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    before = copy.deepcopy(model.state_dict())
    sync_float8_amax_and_scale_history(model)
    assert not caplog.records
    plain = nn.ReLU()
    for _ in range(2):
        sync_float8_amax_and_scale_history(plain)
    (told,) = caplog.messages
    assert "ReLU has no float8 layer; pass what convert_to_float8_training" in told
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_scale_may_start_at_one_as_in_transformer_engine():
    config = Float8LinearConfig(
        *(CastConfig(scaling_type=ScalingType.DELAYED),) * 3, enable_amax_init=False
    )
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    static = CastConfig(scaling_type=ScalingType.STATIC, static_scale=1.0)
    ones = convert_to_float8_training(
        nn.Sequential(copy.deepcopy(model[0]).to_float()),
        config=Float8LinearConfig(static, static, static),
    )
    x = torch.randn(8, 32)
    assert torch.equal(model(x), ones(x))


class _CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_the_number_of_kernels_does_not_grow_with_the_number_of_layers():
    counts = []
    for layers in (1, 8):
        model = _model(layers)
        with _CountOps() as mode:
            sync_float8_amax_and_scale_history(model)
        counts.append(len(mode.ops))
    assert counts[0] == counts[1]


def test_a_model_converted_under_inference_mode_trains():
    linear = nn.Linear(32, 32)
    with torch.inference_mode():
        model = convert_to_float8_training(nn.Sequential(linear), config=RECIPES["delayed"])
    _backward(model, torch.randn(8, 32), torch.randn(8, 32))
    sync_float8_amax_and_scale_history(model)
    assert model[0].cast_input.history_ready


def test_compiled_sync_equals_eager():
    eager = _model(2)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    _backward(eager, x, g)
    compiled = copy.deepcopy(eager)
    sync_float8_amax_and_scale_history(eager)
    first = torch.compile(sync_float8_amax_and_scale_history, backend="eager")
    first(compiled)  # with a graph break: it asks once which casts are ready
    for step in range(2):
        for a, b in zip(eager.buffers(), compiled.buffers(), strict=True):
            assert torch.equal(a, b)
        assert all(cast.history_ready for layer in compiled for cast in layer.casts)
        for model in (eager, compiled):
            _backward(model, x * (step + 2), g)
        sync_float8_amax_and_scale_history(eager)
        torch.compile(sync_float8_amax_and_scale_history, fullgraph=True)(compiled)


def _steps(model, optimizer, count, sync=False):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            if sync:
                sync_float8_amax_and_scale_history(model)
    return [str(w.message) for w in caught]


def test_forgetting_sync_is_told_once_with_the_fix():
    model = _model()
    messages = _steps(model, torch.optim.SGD(model.parameters()), 4)
    assert len(messages) == 1 and "sync_float8_amax_and_scale_history(model)" in messages[0]


def test_two_optimizers_of_one_model_are_two_clocks():
    model = _model()
    first = torch.optim.SGD(model[0].parameters())
    second = torch.optim.SGD(model[1].parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(4, 32)).sum().backward()
            first.step()
            second.step()
            sync_float8_amax_and_scale_history(model)
    assert caught == []


def test_who_syncs_is_not_told_and_neither_are_strangers():
    model, stranger = _model(), nn.Sequential(nn.Linear(32, 32))
    assert _steps(stranger, torch.optim.SGD(stranger.parameters()), 3) == []
    assert _steps(model, torch.optim.SGD(model.parameters()), 3, sync=True) == []
    frozen = _model()
    del frozen
    gc.collect()
    assert _steps(stranger, torch.optim.SGD(stranger.parameters()), 3) == []


def test_the_recipe_is_what_sync_finds():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=RECIPES["delayed"])
    assert model[0].cast_input.amax_history.shape == (16,)


def test_a_group_in_a_single_process_is_checked_by_nobody_and_changes_nothing():
    model, other = _model(1), _model(1)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    other.load_state_dict(model.state_dict())
    for m in (model, other):
        _backward(m, x, g)
    sync_float8_amax_and_scale_history(model)
    sync_float8_amax_and_scale_history(other, group=None)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


class _Backend:
    """A process group, as far as the question goes where its collectives run."""

    def __init__(self, *types):
        self._device_types = [torch.device(kind) for kind in types]


def test_amaxes_meet_on_a_device_that_the_backend_knows():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert sync._reducing_device([cpu, cuda], _Backend("cuda")) == cuda
    assert sync._reducing_device([cpu, cuda], _Backend("cpu", "cuda")) == cpu
    assert sync._reducing_device([cuda], _Backend("cuda")) == cuda


def test_what_is_no_group_is_refused():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh or None"):
            sync_float8_amax_and_scale_history(_model(1), group="data")
    finally:
        torch.distributed.destroy_process_group()


def test_a_rate_on_a_device_is_not_read():
    """That would wait for the device, and fail while a CUDA graph captures the step."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")  # reading it raises
    sync._count_step(optimizer)


def test_a_group_of_one_rank_is_asked_too(monkeypatch):
    """It may be the wrong one: one that lacks the ranks that share the scales."""
    asked = []
    monkeypatch.setattr(sync, "FIRST_SYNC_CHECKS", [lambda model, ranks: asked.append(ranks)])
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sync_float8_amax_and_scale_history(_model(), torch.distributed.new_group([0]))
    finally:
        torch.distributed.destroy_process_group()
    assert asked == [[0]]


@pytest.mark.parametrize("names", ["abc", "cab"])
def test_modules_are_listed_by_name_whatever_their_order(names):
    """Each once, under the first of its names, and without the names of wrappers."""
    layers = {name: nn.Linear(8, 8) for name in sorted(names)}
    model = nn.ModuleDict({name: layers[name] for name in names})
    model["b"] = torch.compile(model["b"], backend="eager")
    model["again"] = nn.ModuleDict({"c": layers["c"]})
    found = sync.modules_by_name(model, nn.Linear)
    assert found == [("a", layers["a"]), ("again.c", layers["c"]), ("b", layers["b"])]


@pytest.mark.parametrize("group", ["nccl", [0, 1], 3, object()])
def test_what_is_no_group_is_refused_in_one_process_too(group):
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh or None, got "):
        sync_float8_amax_and_scale_history(_model(1), group)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_sync_is_one_graph_while_casts_have_no_scale(backend):
    torch.manual_seed(3)
    eager = _model(3)
    eager[1].eval()  # records no amax, and so has no scale
    compiled = copy.deepcopy(eager)
    graphs = CompileCounterWithBackend(backend)
    sync = torch.compile(sync_float8_amax_and_scale_history, backend=graphs, fullgraph=True)
    ready = []
    for step in range(4):
        if step == 3:
            for model in (eager, compiled):
                model[1].train()
        x, g = torch.randn(16, 32) * 2**step, torch.randn(16, 32)
        for model in (eager, compiled):
            _backward(model, x, g)
        sync_float8_amax_and_scale_history(eager)
        sync(compiled)
        for a, b in zip(eager.buffers(), compiled.buffers(), strict=True):
            assert torch.equal(a, b), step
        each = [[c.history_ready for c in model[1].casts] for model in (eager, compiled)]
        assert each[0] == each[1] == [step == 3] * 3
        ready = [c.history_ready for c in compiled[0].casts + compiled[2].casts]
        assert all(ready), step
    assert graphs.frame_count == 2  # before any scale, and after; one graph each


def test_copies_of_casts_are_marked_on_their_own():
    model = _model(1)
    _backward(model, torch.randn(16, 32), torch.randn(16, 32))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    sync_float8_amax_and_scale_history(twins[0])
    assert [m[0].cast_input.history_ready for m in (model, *twins)] == [False, True, False]
    sync_float8_amax_and_scale_history(twins[1])
    assert [m[0].cast_input.history_ready for m in (model, *twins)] == [False, True, True]
