"""What a cast makes of an operand, and the state of a delayed one through all that befalls it."""

from __future__ import annotations

import copy
import importlib
import io
import math
import pickle

import oracle
import pytest
import torch
from assertions import assert_bitwise
from shapes import GRANULARITIES, Case
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import Float8Linear, Float8LinearConfig, float8_linear
from float8 import sync_float8_amax_and_scale_history as sync
from float8.config import CastConfig, DelayedScalingConfig, ScalingType
from float8.distributed.float8_gather import weight_cast
from float8.formats import E4M3, E4M3FNUZ, E5M2, ScaleFormat
from float8.granularity import Blockwise
from float8.linear.autograd import Call, weight_of_forward
from float8.linear.casts import cast_alone, cast_matrix, sharded_state
from float8.linear.float8_weight import cast_again
from float8.linear.plan import USED, plan_for

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


def _casts():
    """Every granularity with every rule for its scales, static scales and a delayed one."""
    for granularity in GRANULARITIES.values():
        for scales in ScaleFormat:
            if scales.is_e8m0 == (granularity == Blockwise(1, 32)):
                for fmt in (E4M3, E5M2):
                    yield CastConfig(
                        granularity=granularity, target_dtype=fmt.dtype, scale_format=scales
                    )
    yield from (CastConfig(ScalingType.STATIC, static_scale=s) for s in (1.0, 0.3, 2.0**-30))
    yield DELAYED


@pytest.mark.parametrize("cast", list(_casts()))
def test_a_cast_has_the_oracles_bits_alone_and_in_a_layer(cast):
    """A delayed one that has no history is dynamic; a static scale saturates."""
    case = Case((37, 300), exponent=-20, fill="wide", layout="transposed", seed=3)
    x = case.make().requires_grad_()
    dtype, block = cast.target_dtype or E4M3.dtype, cast.granularity.block_of((0, 0))
    scale = oracle.scales(x.detach().contiguous(), block, dtype, cast.scale_format.value)
    scale = scale if cast.static_scale is None else torch.full((1, 1), cast.static_scale)
    codes = oracle.cast(x.detach(), scale, block, dtype)
    found = cast_alone(x.detach(), cast.resolve(E4M3))
    assert_bitwise(found.data, codes, (case, cast))
    assert_bitwise(found.scale, scale, (case, cast))
    if cast is not DELAYED:  # by the identity, with scales of 1
        one = CastConfig(ScalingType.STATIC, static_scale=1.0)
        grad = CastConfig(target_dtype=E4M3.dtype)
        config = Float8LinearConfig(cast, one, grad, emulate=True)
        out = float8_linear(x, torch.eye(300), None, config)
        exact = oracle.values(codes, scale, block, dtype).float()
        assert_bitwise(out + 0, exact + 0, (case, cast))


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


@pytest.mark.parametrize("target", [None, torch.float8_e4m3fnuz])
def test_static_scales_mean_the_same_values_in_amd_s_twins(target, monkeypatch):
    """Of a layer, and of a weight that FSDP2 gathers; values up to 8 do not saturate."""
    cast = CastConfig(ScalingType.STATIC, target_dtype=target, static_scale=8 / 448)
    other = CastConfig(ScalingType.STATIC, static_scale=8 / 448)
    config = Float8LinearConfig(other, cast, other, emulate=True)
    layer, x, g = Float8Linear(48, 32, config=config), torch.randn(5, 48), torch.randn(5, 32)
    x[0, :2] = torch.tensor([8.0, -8.0])
    x.requires_grad_()

    def results():
        USED.clear()
        x.grad = layer.weight.grad = None
        out = layer(x)
        out.backward(g)
        weight = weight_cast(layer, layer.weight)[0]
        data, scale, _ = cast_matrix(layer.weight.detach(), weight).row_major
        return [out + 0, x.grad + 0, layer.weight.grad + 0, data.float() * scale + 0]

    expected = results()
    with monkeypatch.context() as patch:
        for name in ("float8.kernels", "float8.kernels.products"):
            patch.setattr(importlib.import_module(name), "family_of", lambda device: "gfx94")
        found = results()
        assert weight_cast(layer, layer.weight)[0].format == E4M3FNUZ  # by which the scale is twice
    USED.clear()
    for mine, its in zip(found, expected, strict=True):
        assert_bitwise(mine, its)


# --- the state of a delayed cast


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.bfloat16().double(),
        lambda m: m.to("cpu", torch.float16).train().eval(),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
    ids=["dtypes", "device and dtype", "deepcopy", "pickle"],
)
def test_the_state_stays_float32_and_unrounded_and_a_copys_is_its_own(change):
    layer = with_history()
    changed = change(layer)
    assert_history(changed, is_kept=True)
    if changed is not layer:
        layer.cast_input.reset_parameters()
        assert_history(changed, is_kept=True)
        assert changed.cast_input.config == layer.cast_input.config


def test_without_amax_init_a_delayed_cast_starts_from_scale_one():
    cast, how = layer_of(amax_init=False).cast_input, DELAYED.resolve(E4M3)
    for _ in range(2):
        assert cast.history_ready
        assert_bitwise(cast_alone(torch.randn(3, 3), how, cast.state).scale, torch.ones(1, 1))
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


def test_a_checkpoint_of_1_0_0_with_the_age_of_a_scale_loads():
    state = synced(layer_of(), 3.0).state_dict()
    layer = layer_of()
    layer.load_state_dict(state | {"cast_input.scale_age": torch.ones(())})
    assert_bitwise(layer.cast_input.scale, state["cast_input.scale"])


def test_a_sharded_operand_finds_its_one_scale_over_the_ranks(monkeypatch):
    """This rank has its own rows' scales only."""
    plan = plan_for(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), "cpu", torch.float32)
    w, largest = torch.randn(16, 32), torch.tensor([[448.0 * 64]])
    monkeypatch.setattr("float8.linear.casts.max_over_ranks", lambda amax, group: largest)
    call = Call(plan, (None, sharded_state(None, "ranks"), None), has_backward=True)
    _, saved, _ = weight_of_forward(w, call)
    assert_bitwise(cast_again(saved, call)[0].scale, torch.tensor([[64.0]]))
