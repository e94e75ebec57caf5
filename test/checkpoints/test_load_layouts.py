"""`load` of the other layouts, written by hand: per tensor, per channel, MX, static inputs."""

from __future__ import annotations

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from hand_written import LAYERS, Block, compressed, write

import float8
from float8 import Float8LinearConfig, ScalingType, convert_to_float8_training
from float8.checkpoints import load

E4M3 = torch.float8_e4m3fn
TOKENS = torch.randint(0, 40, (16,), generator=torch.Generator().manual_seed(3))
INPUT_SCALES = {"up": 0.01, "down": 0.02}
BLOCKS = {"tensor": (-1, -1), "channel": (1, -1)}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["gate"]}


def tensors_of(strategy: str, static: bool = False, seed: int = 1) -> dict[str, torch.Tensor]:
    state = Block(seed=seed).state_dict()
    tensors = {k: v for k, v in state.items() if k != "head.weight"}
    for name in LAYERS:
        data, scale = oracle.quantize(tensors[f"{name}.weight"], BLOCKS[strategy], E4M3, "float32")
        tensors[f"{name}.weight"] = data.view(E4M3)
        tensors[f"{name}.weight_scale"] = scale.reshape(1) if strategy == "tensor" else scale
        if static:
            tensors[f"{name}.input_scale"] = torch.tensor([INPUT_SCALES[name]])
    return tensors


def values(tensors: dict, name: str, strategy: str) -> torch.Tensor:
    scale = tensors[f"{name}.weight_scale"]
    scale = scale.reshape(1, 1) if strategy == "tensor" else scale
    return oracle.values(tensors[f"{name}.weight"], scale, BLOCKS[strategy])


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("static", [False, True])
def test_weights_stay_and_inputs_are_cast_as_the_config_says(tmp_path, strategy, static):
    tensors = tensors_of(strategy, static)
    folder = write(tmp_path, tensors, compressed(strategy, static))
    plain = load(Block(seed=2), folder)
    for name in LAYERS:
        wanted = values(tensors, name, strategy).bfloat16()
        assert_bitwise(plain.get_submodule(name).weight.detach(), wanted)
    model = load(Block(torch.float32, seed=2), folder, "float8")
    x = torch.randn(24, 144, generator=torch.Generator().manual_seed(1))
    if static:
        scale = torch.full((1, 1), INPUT_SCALES["up"])
        codes, block = oracle.cast(x, scale, (-1, -1), E4M3), (-1, -1)
    else:
        codes, scale = oracle.quantize(x, (1, -1), E4M3, "float32")
        block = (1, -1)
    x8 = oracle.values(codes.view(E4M3), scale, block)
    expected = x8 @ values(tensors, "up", strategy).t() + tensors["up.bias"].double()
    assert_sqnr_at_least(model.up(x), expected, 100)
    assert_bitwise(model.up.weight.float8_data, tensors["up.weight"])
    model.up(x.requires_grad_()).sum().backward()  # gradients pass to inputs
    assert x.grad is not None
    assert (model.up.input_scale is not None) == static
    again = load(Block(torch.float32, seed=5), folder, "float8")
    again.load_state_dict(model.state_dict())
    assert_bitwise(again(TOKENS), model(TOKENS))


def test_modelopt_is_static_and_per_tensor(tmp_path):
    tensors = tensors_of("tensor", static=True)
    scales = {k: v.reshape(()) for k, v in tensors.items() if k.endswith("_scale")}
    folder = write(tmp_path / "a", tensors | scales, MODELOPT)
    model = load(Block(seed=2), folder, "float8")
    assert model.up.input_scale == torch.tensor(0.01)
    (folder / "config.json").unlink()
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}'
    )
    other = load(Block(seed=3), folder, "float8")
    assert_bitwise(other(TOKENS), model(TOKENS))
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, '
        '"quantization": {"quant_algo": "FP8", "exclude_modules": ["d*n"]}}'
    )
    with pytest.raises(
        ValueError, match=r"down\.weight is in float8, and hf_quant_config.* 'd\*n'"
    ):
        load(Block(seed=3), folder, "float8")


def test_a_delayed_cast_of_smooth_channels_starts_without_the_scale_of_the_file(tmp_path):
    """That scale is of x, and the cast is of x * s, with amaxes in (0.5, 1]."""
    delayed = float8.CastConfig(ScalingType.DELAYED)
    config = Float8LinearConfig(cast_config_input=delayed, smooth_input=True)
    folder = write(tmp_path, tensors_of("tensor", static=True), compressed("tensor", static=True))
    model = load(Block(seed=2), folder, "training", config=config)
    assert not model.up.cast_input.history_ready
    model(TOKENS).sum().backward()
    float8.after_step(model)
    assert 0.5 < model.up.cast_input.scale * 448 <= 1


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("interval", [1, 4])
def test_delayed_casts_start_with_the_scales_of_the_files(tmp_path, converted, interval):
    delayed = float8.CastConfig(ScalingType.DELAYED)
    config = Float8LinearConfig(
        delayed,
        delayed,
        delayed,
        delayed_scaling=float8.DelayedScalingConfig(history_len=4, margin=1, interval=interval),
    )
    tensors = tensors_of("tensor", static=True)
    folder = write(tmp_path, tensors, compressed("tensor", static=True))
    model = Block(seed=2)
    if converted:
        model = convert_to_float8_training(model, config=config)
        model(TOKENS).sum().backward()
        float8.after_step(model)  # a history that loading replaces
        model = load(model, folder, "training")
    else:
        model = load(model, folder, "training", config=config)
    up = model.up
    assert_bitwise(up.cast_weight.scale.reshape(1), tensors["up.weight_scale"])
    assert up.cast_input.scale == torch.tensor(0.01)
    amax = tensors["up.weight_scale"] * 448 / 2
    assert_bitwise(up.cast_weight.amax_history, torch.cat([amax, torch.zeros(3)]))
    assert up.cast_weight.history_ready
    assert up.cast_input.history_ready
    assert not up.cast_grad_output.history_ready
    assert not up.cast_grad_output.scale.any()
    cast = up.cast_weight(up.weight.detach())
    assert_bitwise(cast.float8_data, tensors["up.weight"])
    assert_bitwise(cast.scale, tensors["up.weight_scale"].reshape(1, 1))
    before = up.cast_weight.scale.clone()
    model(TOKENS).sum().backward()
    float8.after_step(model)
    age = up.cast_weight._buffers.get("scale_age")
    assert (age is None) == (interval == 1)
    if interval == 4:
        assert age == 1
        assert_bitwise(up.cast_weight.scale, before)
    # The weight has not changed, so the next amax is that of the data: 448 times the scale.
    assert_sqnr_at_least(up.cast_weight.amax_history[0], up.weight.detach().abs().amax(), 60)
