"""`prepare_float8`: Accelerate's own loop, checkpoints and wrappers, to the bits of a bare loop."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")

import accelerate_program as program
import one_process as one
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from accelerate_program import make
from assertions import assert_bitwise
from fresh import example_of
from processes import failures
from torch import nn

import float8.optim
from float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.checkpoints import save_pretrained
from float8.checkpoints.source import Source
from float8.config import RECIPES
from float8.convert.filters import skip_names
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations import accelerate as integration
from float8.integrations.accelerate import prepare_float8

GATHERING = replace(RECIPES["tensorwise"], enable_fsdp_float8_all_gather=True)


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerator_of(**options):
    return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def batch(i):
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(i))


def train(accelerator, model, optimizer, numbers):
    return program.train(accelerator, model, optimizer, [batch(i) for i in numbers], clip=1.0)


def bare_loop(model, optimizer, batches):
    losses = []
    for i in batches:
        x, g = batch(i)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        loss = (y.float() * g).sum()
        (loss / 2).backward()
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            sync_float8_amax_and_scale_history(model)
        losses.append(loss.item())
    return losses


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch):
    code = example_of(integration.__doc__)
    assert len(code.splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(integration.Accelerator, "__init__", on_cpu(Accelerator.__init__))
    names = {}
    exec(code, names)
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()
    assert int((names["model"][0].cast_input.amax_history > 0).sum()) == 4  # of 8 microbatches


def on_cpu(init):
    return lambda self, *args, **kwargs: init(self, *args, cpu=True, **kwargs)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_a_bare_loop_in_bf16_has_the_same_bits(recipe):
    expected = convert_to_float8_training(make(), config=RECIPES[recipe])
    losses = bare_loop(expected, one.adamw(expected), range(6))
    model = make()
    accelerator = accelerator_of(mixed_precision="bf16")
    model, optimizer = prepare_float8(accelerator, model, one.adamw(model), recipe)
    assert train(accelerator, model, optimizer, range(6)) == losses
    one.assert_same_model(model, expected, recipe)
    assert type(accelerator.unwrap_model(model)) is nn.Sequential


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_model_that_accelerate_compiles_has_the_same_bits(recipe):
    """Its autocast is around the compiled forward, in which dynamo lets no code switch it."""
    expected = convert_to_float8_training(make(), config=RECIPES[recipe])
    losses = bare_loop(expected, one.adamw(expected), range(2))
    model = make()
    accelerator = accelerator_of(mixed_precision="bf16", dynamo_backend="aot_eager")
    model, optimizer = prepare_float8(accelerator, model, one.adamw(model), recipe)
    assert train(accelerator, model, optimizer, range(2)) == losses
    one.assert_same_model(accelerator.unwrap_model(model), expected, recipe)


@pytest.mark.parametrize("config", [RECIPES["delayed"], GATHERING])
def test_a_saved_state_goes_on_to_the_same_bits_in_another_model(config, tmp_path):
    for seed in (0, 1):
        model = make(seed)
        accelerator = accelerator_of(mixed_precision="bf16")
        loader = torch.utils.data.DataLoader(torch.zeros(8, 2))
        schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        optimizer = one.adamw(model)
        model, optimizer, loader, schedule = prepare_float8(
            accelerator, model, optimizer, config, loader, schedule(optimizer)
        )
        if seed:
            accelerator.load_state(tmp_path)
        else:
            train(accelerator, model, optimizer, range(4))
            schedule.step()
            accelerator.save_state(tmp_path)
        losses = train(accelerator, model, optimizer, range(4, 8))
        assert optimizer.param_groups[0]["lr"] == 0.005
        if not seed:
            expected, first = losses, model
    assert losses == expected
    one.assert_same_model(model, first, config)


def test_a_step_that_a_grad_scaler_skips_is_not_counted():
    accelerator, model = Accelerator(cpu=True), make()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = prepare_float8(accelerator, model, one.adamw(model), "delayed")
    inputs, skipped = [], []
    for factor in (1.0, torch.inf, 1.0):
        x, g = batch(len(inputs))
        inputs.append(x.abs().max())
        accelerator.backward((model(x) * g * factor).sum())
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, True, False]
    expected = torch.stack([max(inputs[1:]), inputs[0]])
    assert torch.equal(model[0].cast_input.amax_history[:3], torch.cat([expected, torch.zeros(1)]))
    found = model[0].cast_grad_output.amax_history[:3]
    assert [amax > 0 for amax in found.tolist()] == [False, True, False]


def test_what_is_frozen_stays_so_and_an_optimizer_may_hold_the_rest():
    model = make()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    config = replace(RECIPES["delayed"], enable_fsdp_float8_all_gather=True)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    accelerator = accelerator_of(mixed_precision="bf16")
    model, optimizer = prepare_float8(accelerator, model, optimizer, config)
    trained = model[2].weight.clone()
    train(accelerator, model, optimizer, range(4))
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[2].weight, trained)
    assert [cast.history_ready for cast in model[0].casts] == [True, True, False]


def test_a_prepared_model_is_saved_as_a_float8_checkpoint(tmp_path):
    model = make()
    accelerator = accelerator_of(mixed_precision="bf16")
    model, optimizer = prepare_float8(accelerator, model, one.adamw(model), "delayed")
    train(accelerator, model, optimizer, range(2))
    save_pretrained(model, tmp_path / "float8")
    source = Source(tmp_path / "float8")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, float8.Float8Linear)}
    assert set(source.layers) == set(layers)
    for name, layer in layers.items():
        found = source.layer(name, layer.weight.dtype)[0]
        assert_bitwise(found.scale, layer.cast_weight.scale.reshape(1, 1))
        assert_bitwise(found.dequantize(), layer.cast_weight(layer.weight.detach()).dequantize())


def test_an_optimizer_of_before_follows_with_its_states():
    stepped = make()
    optimizer = one.adamw(stepped)
    (stepped(batch(0)[0]) * batch(0)[1]).sum().backward()
    optimizer.step()
    expected = convert_to_float8_training(make())
    expected.load_state_dict(stepped.state_dict())
    other = one.adamw(expected)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad()
    losses = bare_loop(expected, other, range(4))
    accelerator = accelerator_of(mixed_precision="bf16")
    model, optimizer = prepare_float8(accelerator, stepped, optimizer, GATHERING)
    assert isinstance(model[0].weight, ShardedWeight)
    assert train(accelerator, model, optimizer, range(4)) == losses
    one.assert_same_model(model, expected, "states")


def test_what_builds_an_optimizer_is_given_the_converted_parameters():
    model = make()
    build = functools.partial(torch.optim.SGD, lr=0.1)
    model, optimizer = prepare_float8(accelerator_of(), model, build, GATHERING)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_a_filter_leaves_layers_out():
    model = make()
    optimizer = one.adamw(model)
    model, _ = prepare_float8(accelerator_of(), model, optimizer, module_filter_fn=skip_names("2"))
    assert [type(model[i]) is nn.Linear for i in (0, 2)] == [False, True]


def test_evaluates_as_te_recipe_kwargs_say(monkeypatch):
    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: 1)
    from accelerate.utils import TERecipeKwargs

    x = batch(0)[0]
    plain = make()(x)
    for in_float8 in (False, True):
        recipe = TERecipeKwargs(amax_history_len=3, use_autocast_during_eval=in_float8)
        model = make()
        model, _ = prepare_float8(accelerator_of(), model, one.adamw(model), recipe)
        assert model[0].config == Float8LinearConfig.from_te_recipe(
            amax_history_len=3, amax_compute_algo="most_recent"
        )
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain) != in_float8


@pytest.mark.parametrize(
    ("own_filter", "converted"), [(lambda module, fqn: fqn == "0", "0"), (None, "2")]
)
def test_torchao_settings_bring_their_filter(own_filter, converted, monkeypatch):
    kwargs = type("AORecipeKwargs", (SimpleNamespace,), {})
    settings = kwargs(config="of torchao", module_filter_func=own_filter)
    seen = []
    made = classmethod(lambda cls, config: seen.append(config) or RECIPES["rowwise"])
    monkeypatch.setattr(Float8LinearConfig, "from_torchao", made)
    model = nn.Sequential(*make(), nn.Linear(32, 24), nn.Linear(24, 32))
    model, _ = prepare_float8(accelerator_of(), model, one.adamw(model), settings)
    assert seen == ["of torchao"]
    assert model.float8_conversion.converted == [converted]
    assert model[int(converted)].config == RECIPES["rowwise"]


class TestRefusals:
    def test_a_prepared_model(self):
        accelerator = accelerator_of()
        model = make()
        model, optimizer = accelerator.prepare(model, one.adamw(model))
        with pytest.raises(ValueError, match="prepared before"):
            prepare_float8(accelerator, model, optimizer)
        with pytest.raises(ValueError, match="prepared before"):
            prepare_float8(accelerator, make(), optimizer)
        assert type(model[0]) is nn.Linear

    def test_an_accelerator_that_converts_by_itself(self, monkeypatch):
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
        model = make()
        with pytest.raises(ValueError, match=r'backend TE have.*mixed_precision="bf16"'):
            prepare_float8(accelerator_of(), model, one.adamw(model))
        monkeypatch.delenv("ACCELERATE_FP8_BACKEND")
        accelerator = accelerator_of()
        monkeypatch.setattr(type(accelerator), "mixed_precision", "fp8")
        with pytest.raises(ValueError, match="mixed_precision='fp8'"):
            prepare_float8(accelerator, model, one.adamw(model))

    @pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
    def test_wrappers_with_parameters_or_steps_of_their_own(self, kind, monkeypatch):
        accelerator, model = accelerator_of(), make()
        monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType[kind])
        monkeypatch.setattr(type(accelerator), "is_fsdp2", False)
        with pytest.raises(ValueError, match=rf"fsdp_version=2\), not {kind}"):
            prepare_float8(accelerator, model, one.adamw(model))


FSDP = {}
CASES = {
    "DDP": ("trains_like_one_process", "delayed"),
    "FSDP2": ("trains_like_one_process", "delayed", FSDP),
    "FSDP2, gathered": ("trains_like_one_process", "gathered tensorwise", FSDP),
    "FSDP2, gathered, delayed": ("trains_like_one_process", "gathered delayed", FSDP),
    "FSDP2, gathered, tied": ("trains_like_one_process", "gathered tensorwise", FSDP, True),
    "FSDP2, from rank 0": (
        "trains_like_one_process",
        "gathered tensorwise",
        {"cpu_ram_efficient_loading": True},
    ),
    "DDP resumes": ("resumes", "delayed"),
    "FSDP2 resumes": ("resumes", "gathered delayed", FSDP),
    "FSDP2 resumes from one file": (
        "resumes",
        "gathered delayed",
        {"state_dict_type": "FULL_STATE_DICT"},
    ),
    "float8 moments": ("float8_optimizer_resumes", "gathered tensorwise", FSDP),
    "bfloat16 model": ("a_bfloat16_model_is_upcast",),
    "clips, saves": ("clips_and_writes_plain_tensors", "gathered delayed"),
    "refusals": ("refuses_what_would_be_lost",),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("accelerate_program", CASES, alone=True) == {}
