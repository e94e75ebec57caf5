"""torchtitan with float8 layers on two processes.

torchtitan's own Trainer runs, by its own command line. It calls functions of an accelerator;
`ANSWERS` has them for the CPU. `test/integrations/test_torchtitan.py` starts the processes.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import shutil
import tempfile
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan's import calls it

import torchtitan.distributed.fsdp as titan_fsdp  # noqa: E402
import torchtitan.distributed.utils as titan_distributed  # noqa: E402
import torchtitan.trainer as titan_trainer  # noqa: E402
from torchtitan.components.lora import LoRAConverter  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.deepseek_v3 import model_registry as deepseek_registry  # noqa: E402
from torchtitan.models.gpt_oss import model_registry as gpt_oss_registry  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from unwritten_rows import unwritten_rows  # noqa: E402

import float8.integrations.torchtitan as ours  # noqa: E402
from float8 import (  # noqa: E402
    Float8LinearConfig,
    convert_from_float8_training,
    convert_to_float8_training,
    high_precision,
)
from float8.config import RECIPES  # noqa: E402
from float8.integrations.torchtitan import Float8Converter, Float8TitanLinear  # noqa: E402

ANSWERS = {
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
}
for name, answer in ANSWERS.items():
    setattr(torch.cpu, name, answer)


def sum_gradients(model):
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


titan_fsdp.disable_fsdp_gradient_division = sum_gradients
titan_distributed.set_pg_timeouts = lambda **_: None  # its barrier names a CUDA device
titan_trainer.time = SimpleNamespace(sleep=lambda _: None, perf_counter=lambda: 0.0)

TYPED = [
    "--module", "scripts.example_torchtitan", "--debug.seed", "0",
    "--training.mixed_precision_param", "float32", "--optimizer.implementation", "foreach",
    "--training.disable_cuda_graphs", "--debug.no-enable_structured_logging",
    "--training.seq_len", "32", "--training.local_batch_size", "2", "--metrics.log_freq", "1",
    # Its default backend, spmd_types, needs a newer torch than 2.13 on more than one rank.
    "--parallelism.spmd_backend", "partial_dtensor",
]  # fmt: skip


def trainer_of(*arguments):
    """A Trainer made by torchtitan's command line; ``losses`` has the logged losses."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    torch.autograd.set_multithreading_enabled(False)  # as its init_distributed does
    config = ConfigManager().parse_args([*TYPED, *arguments])
    trainer = config.build()
    gc.enable()
    trainer.losses = []
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: trainer.losses.append(loss)
    return trainer


@functools.cache
def losses_of(*arguments, steps=3):
    """The logged losses of a run; one run for the same arguments."""
    trainer = trainer_of("--training.steps", str(steps), *arguments)
    trainer.train()
    trainer.close()
    return trainer.losses


def by_override(recipe, **options):
    options = {"recipe": recipe, "filter_fqns": ["lm_head"], **options}
    target = f"float8.integrations.torchtitan.float8={json.dumps(options)}"
    return "--config", "llama3", "--override.imports", target


def float8_layers(model):
    return {fqn for fqn, m in model.named_modules() if isinstance(m, Float8TitanLinear)}


# --- converting configs


def small(**options):
    """A config of two blocks, with layers that a converter does not convert."""
    model = model_registry("debugmodel").model
    model.layers = model.layers[:2]
    odd = Linear.Config(in_features=256, out_features=2040)
    model.layers[1].feed_forward.w2 = odd
    model.layers[1].feed_forward.w3 = ScaledBiasRowwiseLinear.Config(
        in_features=256, out_features=768
    )
    return model


def converter_takes_what_it_should(rank):
    model = small()
    before = dict((fqn, c) for fqn, c, *_ in model.traverse(Linear.Config))
    options = dict(recipe="rowwise", filter_fqns=["lm_head", "layers.0.attention"])
    assert Float8Converter.Config(**options).build().convert(model) is model
    after = dict((fqn, c) for fqn, c, *_ in model.traverse(Linear.Config))
    taken = {fqn for fqn in after if type(after[fqn]) is Float8TitanLinear.Config}
    assert taken == {
        *(f"layers.0.feed_forward.w{i}" for i in (1, 2, 3)),
        *(f"layers.1.attention.{name}" for name in ("qkv_linear.wqkv", "wo")),
        "layers.1.feed_forward.w1",
    }
    for fqn, config in after.items():
        assert (config is before[fqn]) == (fqn not in taken)
        assert config.param_init is before[fqn].param_init
    json.dumps(model.to_dict())  # what torchtitan logs


def converter_says_what_is_wrong(rank):
    build = lambda **options: Float8Converter.Config(**options).build()  # noqa: E731
    with pytest.raises(ValueError, match="rowwise_with_gw_hp"):
        build(recipe="rowwize")
    with pytest.raises(TypeError, match="config must be a Float8LinearConfig"):
        build(config={"recipe": "rowwise"})  # as kwargs of the command line may be
    with pytest.raises(TypeError, match="recipes"):
        ours.float8(small(), recipes="rowwise")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(filter_fqns=["layers", "lm_head"]).convert(small())
    assert "converted to float8 (tensorwise): 0 layers" in str(caught[-1].message)
    with pytest.warns(UserWarning, match=r"no layer is called .\*lmhead\*"):
        build(filter_fqns=["lmhead", "wo"]).convert(small())


def only_faster_layers(rank):
    model = model_registry("debugmodel").model
    model.layers = model.layers[:1]
    w1 = model.layers[0].feed_forward.w1
    w1.in_features = w1.out_features = 8192
    Float8Converter.Config(faster_layers_tokens=16384).build().convert(model)
    configs = dict((fqn, type(c)) for fqn, c, *_ in model.traverse(Linear.Config))
    assert configs["layers.0.feed_forward.w1"] is Float8TitanLinear.Config
    assert configs["layers.0.attention.wo"] is Linear.Config


def layers_keep_the_protocol(rank):
    """torchtitan's own check passes; equal random numbers initialise equal weights."""
    converters = [
        Float8Converter.Config(recipe="delayed", plain_checkpoint=True),
        LoRAConverter.Config(rank=4, target_modules=["wo"]),
    ]
    models = []
    for chosen in (None, converters[:1]):
        config = model_registry("debugmodel", converters=chosen).model
        config.layers = config.layers[:1]
        with torch.device("meta"):
            model = config.build()
        model.verify_module_protocol()
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_states()
        models.append(model.train())
    plain, model = (m.state_dict() for m in models)
    assert plain.keys() == model.keys()
    assert all(torch.equal(plain[key], model[key]) for key in plain)
    layer = models[1].layers["0"].feed_forward.w1
    assert layer.cast_input.amax_history.eq(0).all()
    with high_precision(models[1]):
        x = torch.randn(2, 256)
        assert torch.equal(layer(x), models[0].layers["0"].feed_forward.w1(x))
    assert len(float8_layers(models[1])) == 6
    convert_from_float8_training(models[1])
    assert float8_layers(models[1]) == set()
    assert type(models[1].layers["0"].attention.wo) is Linear
    adapted = model_registry("debugmodel", converters=converters).model
    assert adapted.layers[0].attention.wo._owner.__name__ == "LoRAFloat8TitanLinear"
    adapted.layers = adapted.layers[:1]
    adapted.build().verify_module_protocol()


def what_parallelism_refuses(rank):
    dims = lambda backend, tp: SimpleNamespace(spmd_backend=backend, tp=tp)  # noqa: E731
    gathers = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for config, backend, tp, match in (
        (gathers, "spmd_types", 2, "leave it off"),
        (gathers, "full_dtensor", 1, "hands it DTensors"),
        (RECIPES["delayed"], "partial_dtensor", 2, "use spmd_types"),
    ):
        layer = Float8TitanLinear.Config(
            in_features=16, out_features=16, _float8=config, _fqn="layers.0.wo"
        ).build()
        with pytest.raises(ValueError, match=f"layers.0.wo: .*{match}"):
            layer.parallelize(dims(backend, tp))
    layer.forward = layer.forward  # as torchtitan's parallelize leaves it
    with pytest.raises(ValueError, match="high_precision"):
        layer.to_float()


def other_optimizers_are_left_alone(rank):
    """The process has one hook, for torchtitan's container only; it keeps no layer alive."""
    hooks = _global_optimizer_post_hooks
    config = Float8TitanLinear.Config(in_features=16, out_features=16, recipe="delayed")
    layer = config.build()
    count = len(hooks)
    config.build()
    assert len(hooks) == count > 0
    torch.nn.init.ones_(layer.weight)
    layer(torch.ones(16, 16)).sum().backward()
    torch.optim.SGD(layer.parameters()).step()
    assert layer.cast_input.amax_history.eq(0).all()
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


# --- training


def loss_goes_down(rank):
    losses = losses_of("--config", "llama3_float8", steps=6)
    plain = losses_of("--config", "llama3", steps=6)
    assert sum(losses[-2:]) < sum(losses[:2]) - 1.5, losses
    assert losses != plain
    assert all(abs(a - b) < 0.02 * b for a, b in zip(losses, plain, strict=True)), (losses, plain)


def the_override_is_the_converter(rank):
    options = {"recipe": "delayed", "filter_fqns": ["wo"], "enable_fsdp_float8_all_gather": True}
    converted = model_registry("debugmodel", converters=[Float8Converter.Config(**options)]).model
    overridden = ours.float8(model_registry("debugmodel").model, **options)
    assert chosen_in(overridden) == chosen_in(converted)
    assert len(chosen_in(converted)) == 6 * 4 + 1


def chosen_in(model):
    configs = model.traverse(Float8TitanLinear.Config)
    return {fqn: (c.recipe, c._float8, c.plain_checkpoint) for fqn, c, *_ in configs}


def gathers_in_float8(rank):
    """With dynamic scales at first, then with delayed ones."""
    gathers = by_override("delayed", enable_fsdp_float8_all_gather=True)
    trainer = trainer_of("--training.steps", "3", *gathers)
    weight = trainer.model_parts[0].layers["0"].feed_forward.w1.weight
    assert type(weight._local_tensor).__name__ == "ShardedWeight"
    trainer.train()
    trainer.close()
    assert trainer.losses == losses_of(*by_override("delayed"))


def compiling_changes_nothing(rank):
    """The compiled run is configured by the override, the other one by the converter."""
    compiled = ("--compile.enable", "--compile.components", "model", "--compile.backend", "eager")
    losses = losses_of(*by_override("tensorwise"), *compiled, steps=2)
    assert losses == losses_of("--config", "llama3_float8", steps=6)[:2]


def tensor_parallel(rank):
    arguments = ("--parallelism.tensor_parallel_degree", "2")
    losses = losses_of(*by_override("tensorwise"), *arguments, steps=2)
    plain = losses_of("--config", "llama3", *arguments, steps=2)
    assert losses != plain
    assert all(abs(a - b) < 0.05 for a, b in zip(losses, plain, strict=True)), (losses, plain)


def resumes_exactly(rank):
    """With delayed scaling, whose histories are in the checkpoint; synced once per step."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    saving = (
        "--checkpoint.enable", "--checkpoint.interval", "2", "--dump_folder", folder[0],
        "--checkpoint.no-last-save-model-only", "--checkpoint.keep-latest-k", "0",
    )  # fmt: skip
    typed = by_override("delayed")
    synced, after_step = [], ours.after_step
    ours.after_step = lambda *rest: (synced.append(1), after_step(*rest))
    whole = losses_of(*typed, *saving, steps=3)
    ours.after_step = after_step
    assert len(synced) == 3
    again = losses_of(*typed, *saving, "--checkpoint.load_step", "2", steps=3)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    assert again == whole[2:], (whole, again)


def exports_to_hugging_face(rank):
    """With delayed scaling in every layer, by plain_checkpoint."""
    options = by_override("delayed", plain_checkpoint=True, filter_fqns=[])
    trainer, plain = trainer_of(*options), trainer_of("--config", "llama3")
    spec, model = trainer.config.model_spec, trainer.model_parts[0]
    assert "lm_head" in float8_layers(model)
    adapter = spec.state_dict_adapter(spec.model, None)
    exported = adapter.to_hf(model.state_dict())
    assert exported.keys() == adapter.to_hf(plain.model_parts[0].state_dict()).keys()
    loaded = adapter.from_hf(exported)
    assert loaded.keys() == model.state_dict().keys()
    model.load_state_dict(loaded)
    trainer.close(), plain.close()


# --- mixtures of experts


def two_blocks(registry):
    """The debug model's first two blocks, one of them with experts."""
    config = registry("debugmodel").model
    config.layers = config.layers[:2]
    for _, _, attention, name in config.traverse(FlexAttention.Config):
        setattr(attention, name, ScaledDotProductAttention.Config())
    return config


def built(config):
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def trained(model, steps=2):
    """Losses of a run on text that counts up, and the gradients of its last step."""
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    tokens, losses = torch.arange(34).expand(2, -1) % 32, []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters()}


def experts_train_in_every_recipe(rank):
    """torchtitan's DeepSeek-V3: losses of bfloat16 within 2 %, which decrease.

    The ranks do not communicate: each trains half of the recipes.
    """
    expected, _ = trained(built(two_blocks(deepseek_registry)))
    assert expected[-1] < 0.9 * expected[0], expected
    name = "layers.1.moe.routed_experts.inner_experts"
    for recipe in (("tensorwise", "blockwise"), ("rowwise", "mxfp8"))[rank]:
        config = two_blocks(deepseek_registry)
        converter = Float8Converter.Config(recipe=recipe, filter_fqns=["lm_head"]).build()
        model = built(converter.convert(config))
        model.verify_module_protocol()
        json.dumps(config.to_dict())
        experts = model.get_submodule(name)
        assert isinstance(experts, GroupedExperts)
        assert experts.float8_config == RECIPES[recipe]
        assert type(model.get_submodule("layers.1.moe.router.gate")) is Linear
        assert isinstance(model.get_submodule("layers.1.moe.shared_experts.w1"), Float8TitanLinear)
        losses, gradients = trained(model)
        assert losses != expected
        assert losses == pytest.approx(expected, rel=0.02), (recipe, losses, expected)
        assert all(gradients[f"{name}.{w}"].abs().max() > 0 for w in ("w1_EFD", "w2_EDF", "w3_EFD"))
        assert gradients["layers.1.moe.router.gate.weight"].abs().max() > 0


def rows_beyond_the_last_expert_change_nothing(rank):
    """A dispatcher's buffer may be longer than the tokens of all experts, and no GPU writes there.

    Each rank has one of the two types of experts.
    """
    registry = (deepseek_registry, gpt_oss_registry)[rank]
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        converter = Float8Converter.Config(recipe=recipe, filter_fqns=["lm_head"]).build()
        model = built(converter.convert(two_blocks(registry)))
        experts = model.get_submodule("layers.1.moe.routed_experts.inner_experts")
        expected = results_beside(experts, 0.0)
        with unwritten_rows(torch.nan):
            found = results_beside(experts, torch.nan)
        for one, other in zip(found, expected, strict=True):
            assert other.abs().max() > 0
            assert torch.equal(one, other), (recipe, registry)


def results_beside(experts, fill):
    """Output and gradients of tokens of which the last 9, in no group, are ``fill`` everywhere."""
    counts = torch.arange(experts.num_experts) * 7 % 5
    used, dim = int(counts.sum()), next(experts.parameters()).shape[-1]
    torch.manual_seed(0)
    x, g = torch.randn(2, used + 9, dim).bfloat16().unbind()
    x[used:] = g[used:] = fill
    y = experts(x.requires_grad_(), counts)
    grad_x, *grads = torch.autograd.grad(y, [x, *experts.parameters()], g)
    assert grad_x[used:].isnan().all() == math.isnan(fill)
    return y[:used], grad_x[:used], *grads


def experts_become_plain_again(rank):
    plain = built(two_blocks(deepseek_registry))
    keys, tokens = plain.state_dict().keys(), torch.arange(33).expand(2, -1)
    expected = plain.eval()(tokens)
    model = convert_to_float8_training(plain)
    assert len(model.float8_conversion.experts) == 1
    assert not torch.equal(model(tokens), expected)
    assert model.state_dict().keys() == keys
    assert torch.equal(convert_from_float8_training(model)(tokens), expected)


def a_converter_says_which_experts_it_took(rank):
    warnings.simplefilter("ignore")  # that the last one converts nothing
    said = []
    ours.logger.info = lambda text, conversion: said.append(conversion)
    for registry, options in (
        (deepseek_registry, {"recipe": "delayed"}),
        (deepseek_registry, {"filter_fqns": ["inner_experts"]}),
        (gpt_oss_registry, {"recipe": "rowwise"}),
    ):
        config = two_blocks(registry)
        Float8Converter.Config(**options).build().convert(config)
    Float8Converter.Config(recipe="tensorwise").build().convert(config)
    del ours.logger.info
    name = "layers.1.moe.routed_experts.inner_experts"
    delayed, filtered, gpt_oss, again = said
    assert "keeps a history" in delayed.skipped[name]
    assert "routes tokens" in delayed.skipped["layers.1.moe.router.gate"]
    assert filtered.skipped[name] == "left out by skip_names('*inner_experts*')"
    assert gpt_oss.experts == [f"layers.{i}.moe.routed_experts.inner_experts" for i in (0, 1)]
    assert again.skipped[name].endswith("its forward may be its own, or float8")
