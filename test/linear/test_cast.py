"""What a cast makes of an operand, and the state of a delayed one through all that befalls it."""

from __future__ import annotations

import copy
import io
import math
import pickle

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_same_float8
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import GRANULARITIES, Case
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import Float8Linear, Float8LinearConfig, Float8Tensor, float8_linear
from float8 import sync_float8_amax_and_scale_history as sync
from float8.config import RECIPES, CastConfig, DelayedScalingConfig, ScalingType
from float8.formats import E4M3, E4M3FNUZ, E5M2, ScaleFormat
from float8.granularity import Blockwise, Rowwise

DELAYED = CastConfig(ScalingType.DELAYED)
BUFFERS = ("amax_history", "scale", "current_amax")
SCALE, AMAXES, CURRENT = 0.1, [3.0, 2.0, 1.0, 0.0], 5.0


def layer_of(cast=DELAYED, device=None, *, amax_init=True, **history) -> Float8Linear:
    """A layer whose input has this cast."""
    settings = {"history_len": 4} | history if cast is DELAYED else {}
    config = Float8LinearConfig(
        cast,
        cast_config_grad_output=CastConfig(target_dtype=E4M3.dtype),
        delayed_scaling=DelayedScalingConfig(**settings),
        enable_amax_init=amax_init,
        emulate=True,
    )
    return Float8Linear(2, 2, device=device, config=config)


def with_history():
    """A layer whose cast has a history, as ``sync`` leaves it, and an amax recorded since."""
    layer = synced(layer_of(), 1.0)
    layer.cast_input.amax_history.copy_(torch.tensor(AMAXES))
    layer.cast_input.scale.fill_(SCALE)
    layer.cast_input.current_amax.fill_(CURRENT)
    return layer


def synced(layer, amax: float):
    layer.cast_input.current_amax.fill_(amax)
    sync(layer)
    return layer


def assert_history(layer, is_kept: bool) -> None:
    cast = layer.cast_input
    assert cast.amax_history.tolist() == (AMAXES if is_kept else [0.0] * 4)
    assert_bitwise(cast.scale, torch.tensor(SCALE if is_kept else 0.0))
    assert cast.current_amax == (CURRENT if is_kept else 0)
    assert cast.history_ready == is_kept
    assert {b.dtype for b in cast.buffers()} == {torch.float32}


# --- what a layer multiplies


def multiplied(x, cast: CastConfig):
    """What a layer multiplies for x: by the identity, with scales of 1."""
    one = CastConfig(ScalingType.STATIC, static_scale=1.0)
    identity = torch.eye(x.shape[1], dtype=x.dtype)
    grad = CastConfig(target_dtype=E4M3.dtype)
    return float8_linear(x, identity, None, Float8LinearConfig(cast, one, grad, emulate=True))


MX = {Blockwise(1, 32)}


@given(
    st.sampled_from(list(GRANULARITIES.values())),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from(list(ScaleFormat)),
    st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_a_dynamic_scale_is_that_of_this_very_tensor(granularity, fmt, scales, seed):
    if scales.is_e8m0 != (granularity in MX):
        return
    case = Case((37, 300), exponent=-20, fill="wide", layout="transposed", seed=seed)
    cast = CastConfig(granularity=granularity, target_dtype=fmt.dtype, scale_format=scales)
    x, block = case.make(), granularity.block_of((0, 0))
    codes, scale = oracle.quantize(x.contiguous(), block, fmt.dtype, scales.value)
    exact = oracle.values(codes, scale, block, fmt.dtype)
    assert_bitwise(multiplied(x, cast) + 0, exact.float() + 0, (case, cast))


@pytest.mark.parametrize("static", [1.0, 0.3, 2.0**-30])
def test_a_static_scale_is_the_constant_and_saturates(static):
    x = Case((5, 123), exponent=10).make()
    config = CastConfig(ScalingType.STATIC, static_scale=static)
    scale = torch.full((1, 1), static)
    codes = oracle.cast(x, scale, (-1, -1), E4M3.dtype)
    exact = oracle.values(codes, scale, (-1, -1), E4M3.dtype)
    assert_bitwise(multiplied(x, config) + 0, exact.float() + 0)
    assert_bitwise(layer_of(config).cast_input(x).float8_data, codes)


def test_constants_of_a_tracer_or_of_inference_mode_harm_no_later_step():
    config = Float8LinearConfig(*[CastConfig(ScalingType.STATIC, static_scale=0.40625)] * 2)
    layer, x = Float8Linear(16, 16, config=config), torch.randn(4, 16)
    with torch.inference_mode():
        expected = layer(x).clone()
    with FakeTensorMode(allow_non_fake_inputs=True):
        float8_linear(torch.randn(4, 16), torch.randn(16, 16), None, config)
    out = layer(x.requires_grad_())
    out.sum().backward()
    assert_bitwise(out, expected)


@pytest.mark.parametrize(
    "cast",
    [
        CastConfig(),
        CastConfig(target_dtype=torch.float8_e5m2),
        CastConfig(granularity=Rowwise(), scale_format=ScaleFormat.POWER_OF_TWO),
        CastConfig(granularity=Blockwise(3, 5)),
        CastConfig(ScalingType.STATIC, static_scale=0.5),
        DELAYED,
    ],
)
def test_a_cast_can_be_called_and_gradients_pass_straight_through(cast):
    x, g = Case((5, 123), fill="wide").make().requires_grad_(), torch.randn(5, 123)
    found = layer_of(cast).cast_input(x)
    expected = Float8Tensor.from_high_precision(
        x, cast.target_dtype or E4M3, cast.granularity, cast.static_scale, cast.scale_format
    )
    assert_same_float8(found, expected, cast)
    found.dequantize().backward(g)
    assert_bitwise(x.grad, g)


def test_a_disabled_cast_returns_the_tensor_itself():
    off = CastConfig(ScalingType.DISABLED)
    layer, x = Float8Linear(2, 2, config=Float8LinearConfig(off, off, off)), torch.randn(3, 3)
    assert layer.cast_input(x) is x


def test_amd_s_twin_of_the_format_is_cast_there(monkeypatch):
    monkeypatch.setattr("float8.linear.scaling.on_device", lambda fmt, device: E4M3FNUZ)
    x = torch.randn(5, 123)
    expected = Float8Tensor.from_high_precision(x, E4M3FNUZ)
    assert_same_float8(layer_of(CastConfig()).cast_input(x), expected)


def test_only_delayed_casts_have_state():
    """So the others are no modules: hooks, styles and printing of torch see the layer alone."""
    assert list(layer_of().cast_input.state_dict()) == list(BUFFERS)
    assert list(layer_of(interval=2).cast_input.state_dict()) == [*BUFFERS, "scale_age"]
    for config in (RECIPES["tensorwise"], RECIPES["unit"], RECIPES["rowwise_with_gw_hp"]):
        layer = Float8Linear(16, 16, config=config)
        for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert list(twin.modules()) == [twin]
            assert list(twin.state_dict()) == ["weight", "bias"]
            assert [repr(c) for c in twin.casts] == [repr(c) for c in layer.casts]


@pytest.mark.parametrize(
    ("cast", "text"),
    [
        (CastConfig(target_dtype=torch.float8_e5m2), "Cast(dynamic tensorwise e5m2)"),
        (CastConfig(granularity=Rowwise()), "Cast(dynamic rowwise e4m3)"),
        (DELAYED, "DelayedCast(delayed tensorwise e4m3)"),
    ],
)
def test_a_cast_is_printed_with_the_format_that_default_means(cast, text):
    assert repr(layer_of(cast).cast_input) == text


# --- the state of a delayed cast


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16().double(),
        lambda m: m.to("cpu", torch.float16).train().eval(),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
    ids=["bfloat16", "half", "double", "device and dtype", "deepcopy", "pickle"],
)
def test_the_state_stays_float32_and_unrounded_and_a_copys_is_its_own(change):
    layer = with_history()
    changed = change(layer)
    assert_history(changed, is_kept=True)
    if changed is not layer:
        layer.cast_input.reset_parameters()
        assert_history(changed, is_kept=True)
        assert changed.cast_input.config == layer.cast_input.config


def test_a_model_on_meta_comes_to_life_with_a_new_history():
    new, used = layer_of(device="meta").to(torch.bfloat16), with_history().to("meta")
    for layer in (new, used):
        assert all(b.is_meta for b in layer.buffers())
        assert_history(layer.to_empty(device="cpu"), is_kept=False)
    assert new.weight.dtype == torch.bfloat16


def test_without_amax_init_a_delayed_cast_starts_from_scale_one():
    cast = layer_of(amax_init=False).cast_input
    for _ in range(2):
        assert cast.history_ready
        assert_bitwise(cast(torch.randn(3, 3)).scale, torch.ones(1, 1))
        cast.reset_parameters()


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_checkpoint_brings_the_history_back(assign, is_rounded):
    state, fresh = saved_and_loaded(with_history().state_dict()), layer_of()
    if is_rounded:
        state = {name: t.bfloat16() for name, t in state.items()}
    fresh.load_state_dict(state, strict=True, assign=assign)
    if not is_rounded:
        assert_history(fresh, is_kept=True)
    assert fresh.cast_input.history_ready
    assert {b.dtype for b in fresh.buffers()} == {torch.float32}
    fresh.load_state_dict(layer_of().state_dict())  # from before the first sync
    assert_history(fresh, is_kept=False)


def test_a_plain_checkpoint_starts_a_new_history_and_one_of_other_tensors_does_not():
    plain = nn.Linear(2, 2).state_dict()
    layer, meta = with_history(), layer_of(device="meta")
    layer.load_state_dict({"bias": torch.zeros(2)}, strict=False)
    assert_history(layer, is_kept=True)
    layer.load_state_dict(plain, strict=True)
    meta.load_state_dict(plain, strict=True, assign=True)
    for loaded in (layer, meta):
        assert_history(loaded, is_kept=False)
        assert_bitwise(loaded.weight, plain["weight"])
        assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_spoilt_scale_in_a_checkpoint_is_not_used(scale):
    layer = layer_of()
    layer.load_state_dict(with_history().state_dict() | {"cast_input.scale": torch.tensor(scale)})
    assert not layer.cast_input.history_ready


@pytest.mark.parametrize("missing", BUFFERS)
def test_a_torn_checkpoint_is_an_error_that_names_what_is_missing(missing):
    state, layer = with_history().state_dict(), layer_of()
    del state[f"cast_input.{missing}"]
    with pytest.raises(RuntimeError, match=f"Missing key.*{missing}"):
        layer.load_state_dict(state, strict=True)
    layer.load_state_dict(state, strict=False)
    assert layer.cast_input.history_ready == (missing != "scale")


def test_a_history_of_another_length_is_an_error():
    with pytest.raises(RuntimeError, match=r"size mismatch for cast_input\.amax_history"):
        layer_of().load_state_dict(layer_of(history_len=7).state_dict())


# --- scales that are found anew every few syncs


@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_a_resumed_training_finds_scales_when_the_other_one_does(saved_after):
    first, second = layer_of(interval=3), layer_of(interval=3)
    for step in range(9):
        if step == saved_after:
            second.load_state_dict(first.state_dict(), strict=True)
        for layer in (first, second) if step >= saved_after else (first,):
            synced(layer, 2.0**step)
        if step >= saved_after:
            assert_bitwise(second.cast_input.scale, first.cast_input.scale, (saved_after, step))


@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (3, 1), (9, 2)])
def test_a_checkpoint_of_another_interval_loads_strictly(saved, loaded):
    source, target = synced(layer_of(interval=saved), 7.0), layer_of(interval=loaded)
    target.load_state_dict(source.state_dict(), strict=True)
    assert_bitwise(target.cast_input.scale, source.cast_input.scale)
    assert target.cast_input.history_ready
    synced(target, 14.0)
    is_new = saved == 1 or loaded == 1  # without an age, or without an interval
    assert target.cast_input.scale.item() == pytest.approx((14.0 if is_new else 7.0) / E4M3.max)


def test_the_age_of_a_scale_survives_what_befalls_a_module():
    layer = synced(synced(layer_of(interval=3), 3.0), 5.0)
    twins = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer).bfloat16())
    for twin in twins:
        age = twin.cast_input.scale_age
        assert age == 1 and age.dtype == torch.float32
    layer.cast_input.reset_parameters()
    for new in (layer, layer_of(device="meta", interval=3).to_empty(device="cpu")):
        assert new.cast_input.scale_age == math.inf
