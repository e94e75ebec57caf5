"""The casts, and the state of the delayed one through everything that befalls a module."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_same_float8
from shapes import Case
from torch import nn

from float8 import Float8Linear, Float8Tensor, sync_float8_amax_and_scale_history
from float8.config import RECIPES, CastConfig, DelayedScalingConfig, ScalingType
from float8.formats import E4M3, E5M2, ScaleFormat
from float8.granularity import Blockwise, Rowwise
from float8.linear.cast import Cast, DelayedCast, make_cast

HISTORY = DelayedScalingConfig(history_len=4)
BUFFERS = ("amax_history", "scale", "current_amax")
SCALE, AMAXES, CURRENT = 0.1, [3.0, 2.0, 1.0, 0.0], 5.0


def make(scaling=ScalingType.DYNAMIC, fmt=E4M3, amax_init=True, device=None, **config) -> Cast:
    return make_cast(CastConfig(scaling, **config), fmt, HISTORY, amax_init, device)


def with_history() -> DelayedCast:
    """A delayed cast as ``sync`` leaves it, and with an amax recorded since."""
    cast = make(ScalingType.DELAYED)
    cast.amax_history.copy_(torch.tensor(AMAXES))
    cast.scale.fill_(SCALE)
    cast.current_amax.fill_(CURRENT)
    cast.history_ready = cast.synced = True
    return cast


def assert_history_is_kept(cast: DelayedCast) -> None:
    assert cast.amax_history.tolist() == AMAXES
    assert_bitwise(cast.scale, torch.tensor(SCALE))
    assert cast.current_amax.item() == CURRENT
    assert cast.history_ready
    assert {b.dtype for b in cast.buffers()} == {torch.float32}


def assert_history_is_new(cast: DelayedCast) -> None:
    assert cast.amax_history.tolist() == [0.0] * 4
    assert cast.scale.item() == 0.0
    assert cast.current_amax.item() == 0.0
    assert not cast.history_ready


# --- what each cast makes of a tensor


@pytest.mark.parametrize(
    ("config", "fmt"),
    [
        ({}, E4M3),
        ({}, E5M2),
        ({"granularity": Rowwise(), "scale_format": ScaleFormat.POWER_OF_TWO}, E4M3),
        ({"granularity": Blockwise(3, 5)}, E5M2),
        ({"target_dtype": torch.float8_e5m2}, E4M3),
        ({"scale_format": ScaleFormat.POWER_OF_TWO}, E4M3),
    ],
)
def test_a_dynamic_cast_is_from_high_precision(config, fmt):
    case = Case((5, 123), torch.bfloat16, fill="wide")
    actual = make(fmt=fmt, **config)(case.make())
    expected = Float8Tensor.from_high_precision(
        case.make(),
        config.get("target_dtype", fmt.dtype),
        config.get("granularity"),
        scale_format=config.get("scale_format", ScaleFormat.FLOAT32),
    )
    assert_same_float8(actual, expected, (case, config))


def test_a_static_cast_has_its_scale_and_saturates():
    x = Case((2, 3, 7), exponent=12).make()
    cast = make(ScalingType.STATIC, static_scale=0.5)
    actual = cast(x)
    assert actual.shape == x.shape
    assert_bitwise(actual.scale, torch.full((1, 1, 1), 0.5))
    expected = oracle.cast(x, actual.scale, actual.block, torch.float8_e4m3fn)
    assert_bitwise(actual.float8_data, expected)
    assert cast.state is None


def test_no_cast_returns_the_tensor_itself():
    x = torch.randn(3, 3, requires_grad=True)
    cast = make(ScalingType.DISABLED)
    assert cast(x) is x
    assert cast.state is None


def test_a_delayed_cast_is_dynamic_until_the_first_sync_and_then_has_its_scale():
    x = Case((2, 3, 7)).make()
    cast = make(ScalingType.DELAYED)
    dynamic = make()(x)
    assert_same_float8(cast(x), dynamic)
    cast.scale.fill_(0.25)
    cast.history_ready = True
    assert_bitwise(cast(x).scale, torch.full((1, 1, 1), 0.25))
    assert cast.current_amax == 0  # calling it records nothing; layers record


def test_without_amax_init_a_delayed_cast_starts_from_scale_one():
    cast = make(ScalingType.DELAYED, amax_init=False)
    assert cast.history_ready
    assert_bitwise(cast(torch.randn(3, 3)).scale, torch.ones(1, 1))
    cast.reset_parameters()
    assert cast.history_ready
    assert cast.scale == 1


def test_the_state_is_the_buffers_themselves():
    cast = with_history()
    assert cast.state.scale is cast.scale
    assert cast.state.current_amax is cast.current_amax
    assert cast.state.ready
    assert not make(ScalingType.DELAYED).state.ready


@pytest.mark.parametrize("scaling", [ScalingType.DYNAMIC, ScalingType.DELAYED, ScalingType.STATIC])
def test_gradients_pass_straight_through(scaling):
    x, g = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    static = 0.01 if scaling is ScalingType.STATIC else None
    make(scaling, static_scale=static)(x).dequantize().backward(g)
    assert_bitwise(x.grad, g)


def test_only_delayed_casts_have_state():
    """So the others are no modules: hooks, styles and printing of torch see the layer alone."""
    assert list(make(ScalingType.DELAYED).state_dict()) == list(BUFFERS)
    for config in (RECIPES["tensorwise"], RECIPES["unit"], RECIPES["rowwise_with_gw_hp"]):
        layer = Float8Linear(16, 16, config=config)
        for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert list(twin.modules()) == [twin]
            assert list(twin.state_dict()) == ["weight", "bias"]
            assert [repr(c) for c in twin.casts] == [repr(c) for c in layer.casts]


def test_a_cast_is_printed_with_the_format_that_default_means():
    assert repr(make(fmt=E5M2)) == "Cast(dynamic tensorwise e5m2)"
    assert repr(make(granularity=Rowwise())) == "Cast(dynamic rowwise e4m3)"
    assert repr(make(ScalingType.DISABLED)) == "Cast(high precision)"
    assert repr(make(ScalingType.DELAYED)) == "DelayedCast(delayed tensorwise e4m3)"


def test_the_format_on_the_device_is_that_of_the_buffers(monkeypatch):
    from float8.linear import delayed as module

    seen = []
    monkeypatch.setattr(module, "on_device", lambda fmt, device: seen.append(device) or fmt)
    assert make(ScalingType.DELAYED, E5M2, device="meta").format_on_device is E5M2
    assert seen == [torch.device("meta")]


# --- the state of a delayed cast


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16().float(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.cpu(),
        lambda m: m.train().eval(),
    ],
    ids=["to bfloat16", "half", "there and back", "device and dtype", "cpu", "eval"],
)
def test_the_state_stays_float32_and_unrounded(convert):
    model = nn.Sequential(with_history(), nn.Linear(2, 2))
    convert(model)
    assert_history_is_kept(model[0])


def test_double_does_not_change_the_state_either():
    cast = with_history().double()
    assert_history_is_kept(cast)


@pytest.mark.parametrize(
    "twin",
    [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_has_its_own_state(twin):
    cast = with_history()
    other = twin(cast)
    assert_history_is_kept(other)
    assert other.config == cast.config
    assert other.synced
    cast.reset_parameters()
    assert_history_is_kept(other)


def test_to_empty_starts_a_new_history():
    with torch.device("meta"):
        cast = make(ScalingType.DELAYED)
    assert all(b.is_meta for b in cast.buffers())
    assert_history_is_new(cast.to_empty(device="cpu"))
    used = with_history().to("meta").to_empty(device="cpu")
    assert_history_is_new(used)


def test_a_half_model_on_meta_comes_to_life_with_float32_state():
    model = nn.Sequential(make(ScalingType.DELAYED, device="meta"), nn.Linear(2, 2, device="meta"))
    model.to(torch.bfloat16).to_empty(device="cpu")
    assert_history_is_new(model[0])
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert model[1].weight.dtype == torch.bfloat16


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_brings_the_history_back(assign):
    fresh = nn.Sequential(make(ScalingType.DELAYED))
    state = saved_and_loaded(nn.Sequential(with_history()).state_dict())
    fresh.load_state_dict(state, strict=True, assign=assign)
    assert_history_is_kept(fresh[0])


def test_a_checkpoint_from_before_the_first_sync_is_not_ready():
    cast = with_history()
    cast.load_state_dict(make(ScalingType.DELAYED).state_dict())
    assert_history_is_new(cast)


def layer(cast: DelayedCast, device: str = "cpu") -> nn.Sequential:
    """A model of one layer, whose cast of the input is this one."""
    config = replace(RECIPES["delayed"], delayed_scaling=HISTORY)
    model = nn.Sequential(Float8Linear(2, 2, device=device, config=config))
    model[0].cast_input = cast
    return model


def test_a_plain_checkpoint_loads_strictly_and_starts_a_new_history():
    model, plain = layer(with_history()), nn.Sequential(nn.Linear(2, 2))
    model.load_state_dict(plain.state_dict(), strict=True)
    assert_history_is_new(model[0].cast_input)
    assert_bitwise(model[0].weight, plain[0].weight)


def test_a_plain_checkpoint_brings_a_layer_on_meta_to_life():
    model = layer(make(ScalingType.DELAYED, device="meta"), "meta")
    model.load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict(), strict=True, assign=True)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert_history_is_new(model[0].cast_input)


def test_a_checkpoint_of_other_layers_leaves_the_history_alone():
    model = layer(with_history())
    model.load_state_dict({"0.bias": torch.zeros(2)}, strict=False)
    assert_history_is_kept(model[0].cast_input)


def test_a_rounded_checkpoint_leaves_the_state_float32():
    state = {name: t.bfloat16() for name, t in with_history().state_dict().items()}
    cast = make(ScalingType.DELAYED)
    cast.load_state_dict(state, assign=True)
    assert {b.dtype for b in cast.buffers()} == {torch.float32}
    assert cast.history_ready


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_spoilt_scale_in_a_checkpoint_is_not_used(scale):
    state = {**with_history().state_dict(), "scale": torch.tensor(scale)}
    cast = make(ScalingType.DELAYED)
    cast.load_state_dict(state)
    assert not cast.history_ready


@pytest.mark.parametrize("missing", BUFFERS)
def test_a_torn_checkpoint_is_an_error_that_names_what_is_missing(missing):
    state = with_history().state_dict()
    del state[missing]
    with pytest.raises(RuntimeError, match=f"Missing key.*{missing}"):
        make(ScalingType.DELAYED).load_state_dict(state, strict=True)


def test_a_torn_checkpoint_loads_what_it_has_where_that_is_asked_for():
    state = with_history().state_dict()
    del state["current_amax"]
    cast = make(ScalingType.DELAYED)
    cast.load_state_dict(state, strict=False)
    assert cast.amax_history.tolist() == AMAXES
    assert cast.history_ready


def test_a_history_of_another_length_is_an_error():
    other = make_cast(CastConfig(ScalingType.DELAYED), E4M3, DelayedScalingConfig(history_len=7))
    with pytest.raises(RuntimeError, match="size mismatch for amax_history"):
        make(ScalingType.DELAYED).load_state_dict(other.state_dict())


def test_plain_keys_can_be_asked_for():
    cast = with_history()
    cast.hidden = True
    assert list(nn.Sequential(cast, nn.Linear(2, 2)).state_dict()) == ["1.weight", "1.bias"]


# --- scales that are found anew every few syncs


def with_interval(interval: int, device: str | None = None) -> DelayedCast:
    config = replace(HISTORY, interval=interval)
    return make_cast(CastConfig(ScalingType.DELAYED), E4M3, config, device=device)


def synced(cast: DelayedCast, amax: float) -> DelayedCast:
    cast.current_amax.fill_(amax)
    sync_float8_amax_and_scale_history(cast)
    return cast


def test_only_an_interval_adds_a_buffer():
    assert tuple(with_interval(1).state_dict()) == BUFFERS
    assert tuple(with_interval(2).state_dict()) == (*BUFFERS, "scale_age")


@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_a_resumed_training_finds_scales_when_the_other_one_does(saved_after):
    first = with_interval(3)
    for step in range(saved_after):
        synced(first, 2.0**step)
    second = with_interval(3)
    second.load_state_dict(first.state_dict(), strict=True)
    for step in range(saved_after, 9):
        for cast in (first, second):
            synced(cast, 2.0**step)
        assert_bitwise(second.scale, first.scale, (saved_after, step))


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (3, 1), (9, 2)])
def test_a_checkpoint_of_another_interval_loads_strictly(prefixed, saved, loaded):
    source, target = synced(with_interval(saved), 7.0), with_interval(loaded)
    if prefixed:
        nn.Sequential(target).load_state_dict(nn.Sequential(source).state_dict(), strict=True)
    else:
        target.load_state_dict(source.state_dict(), strict=True)
    assert_bitwise(target.scale, source.scale)
    assert target.history_ready
    synced(target, 14.0)
    is_new = saved == 1 or loaded == 1  # without an age, or without an interval
    assert target.scale.item() == pytest.approx((14.0 if is_new else 7.0) / E4M3.max)


def test_the_age_of_a_scale_survives_what_befalls_a_module():
    cast = synced(synced(with_interval(3), 3.0), 5.0)
    for twin in (copy.deepcopy(cast), pickle.loads(pickle.dumps(cast)), copy.copy(cast).bfloat16()):
        assert twin.scale_age.item() == 1 and twin.scale_age.dtype == torch.float32
    cast.reset_parameters()
    assert cast.scale_age.item() == float("inf")
    alive = with_interval(3, device="meta").to_empty(device="cpu")
    assert alive.scale_age.item() == float("inf")
