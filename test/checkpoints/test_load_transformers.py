"""`load` into models of Transformers and Accelerate, and adapters of PEFT on what it loads."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from hand_written import FINE, dequantised, fine_grained, write
from torch import nn

import float8
from float8 import Float8Linear, Float8LinearConfig
from float8.checkpoints import load, save_pretrained

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    # Two blocks: Transformers 5.23 dequantises 160 rows of 2 scales in blocks of 80 instead of 128.
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}


def model_of(kind: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False)
    else:
        config = CONFIGS[kind]()
    # Not .to(dtype), which would round the frequencies of rotary embeddings.
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def published(model: nn.Module, folder) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What ``save_pretrained`` of Transformers writes, and the layers that become float8."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layers = [k.removesuffix(".weight") for k in tensors if k.endswith("_proj.weight")]
    return tensors, layers


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def stored(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tensors, layers = published(model_of(request.param, seed=1), folder)
    tensors = fine_grained(tensors, layers)
    config = (folder / "config.json").read_text()
    write(folder, tensors)
    import json

    full = json.loads(config) | {
        "quantization_config": FINE | {"modules_to_not_convert": ["lm_head"]}
    }
    (folder / "config.json").write_text(json.dumps(full))
    return request.param, folder, tensors, layers


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.filterwarnings("ignore")
def test_dequantised_logits_are_those_of_transformers_own_load(stored):
    kind, folder, tensors, layers = stored
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        dtype=torch.bfloat16,
    ).eval()
    ours = load(model_of(kind, seed=2), folder)
    for name in layers:
        wanted = dequantised(tensors, name, torch.bfloat16)
        assert_bitwise(ours.get_parameter(f"{name}.weight").detach(), wanted)
    assert_bitwise(logits(ours), logits(theirs))


def test_float8_logits_are_near(stored):
    kind, folder, _, layers = stored
    plain = load(model_of(kind, seed=2), folder)
    model = load(model_of(kind, seed=3), folder, "float8")
    assert sorted(model.float8_conversion.converted) == sorted(layers)
    assert type(model.lm_head) is nn.Linear
    assert_sqnr_at_least(logits(model), logits(plain), 22)


@pytest.mark.parametrize("weights", ["high_precision", "float8"])
def test_a_config_of_the_files_does_not_describe_the_loaded_model(weights, tmp_path):
    """Transformers' save_pretrained would write it, and readers would look for scales."""
    config = Float8LinearConfig.from_recipe_name("blockwise")
    heads = float8.filters.skip_names("lm_head")
    source = model_of("qwen3", seed=1)
    source = float8.convert_to_float8_training(source, config=config, module_filter_fn=heads)
    save_pretrained(source, tmp_path / "fp8")
    read = transformers.AutoConfig.from_pretrained(tmp_path / "fp8")
    assert read.quantization_config["quant_method"] == "fp8"
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.bfloat16).eval()
    with pytest.raises(ValueError, match="needs a converted model"):
        load(model, tmp_path / "fp8", "training")
    assert hasattr(model.config, "quantization_config")  # nothing changes when it raises
    model = load(model, tmp_path / "fp8", weights)
    assert not hasattr(model.config, "quantization_config")
    if weights == "high_precision":
        model.save_pretrained(tmp_path / "plain")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        assert again.dtype == torch.bfloat16
        assert_bitwise(again.eval()(TOKENS).logits, model(TOKENS).logits)


def test_a_model_without_memory_loads(stored):
    accelerate = pytest.importorskip("accelerate")
    kind, folder, _, _ = stored
    with accelerate.init_empty_weights():
        empty = model_of(kind)
    for weights in ("high_precision", "float8"):
        with accelerate.init_empty_weights():
            empty = model_of(kind)
        model = load(empty, folder, weights)
        assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
        assert_bitwise(logits(model), logits(load(model_of(kind, seed=4), folder, weights)))
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert_bitwise(logits(model), logits(load(model_of(kind, seed=4), folder, "float8")))
    with torch.device("meta"):
        empty = model_of(kind)
    with pytest.raises(ValueError, match=r"inv_freq is a buffer on the meta device.*accelerate"):
        load(empty, folder)


def test_experts_are_loaded_into_their_stacks(tmp_path):
    tensors, layers = published(model_of("qwen3_moe", seed=1), tmp_path)
    experts = [name for name in layers if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    tensors = fine_grained(tensors, layers)
    folder = write(tmp_path, tensors)
    model = load(model_of("qwen3_moe", seed=2), folder)
    stack = model.model.layers[1].mlp.experts.gate_up_proj
    name = "model.layers.1.mlp.experts.2"
    gate, up = (dequantised(tensors, f"{name}.{n}_proj", torch.bfloat16) for n in ("gate", "up"))
    assert_bitwise(stack[2].detach(), torch.cat([gate, up]))
    resident = load(model_of("qwen3_moe", seed=3), folder, "float8")
    assert_bitwise(resident.model.layers[1].mlp.experts.gate_up_proj.detach(), stack.detach())
    converted = resident.float8_conversion.converted
    assert sorted(converted) == sorted(set(layers) - set(experts))
    reason = resident.float8_conversion.skipped["model.layers.1.mlp.experts"]
    assert "experts" in reason
    config = Float8LinearConfig.from_recipe_name("blockwise")
    trained = load(model_of("qwen3_moe", seed=3), folder, "training", config=config)
    assert "model.layers.1.mlp.experts" in trained.float8_conversion.experts


@pytest.mark.parametrize("weights", ["high_precision", "float8", "training"])
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_no_parameter_keeps_what_it_had(recipe, weights, tmp_path):
    """A model that starts as NaN: no expert, and nothing else, is left out."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    heads = float8.filters.skip_names("lm_head")
    source = float8.convert_to_float8_training(
        model_of("qwen3_moe", seed=1), config=config, module_filter_fn=heads
    )
    save_pretrained(source, tmp_path)
    model = model_of("qwen3_moe", seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load(model, tmp_path, weights, config=config if weights == "training" else None)
    for name, expected in source.named_parameters():
        found = model.get_parameter(name)
        found = found.dequantize() if isinstance(found, float8.Float8Tensor) else found
        for own, its in zip(found.detach(), expected.detach(), strict=True):
            assert bool(((own - its).abs() <= its.abs() / 16 + 2**-9 * its.abs().max()).all()), name


def test_what_this_library_writes_loads_to_the_same_bits(tmp_path):
    config = Float8LinearConfig.from_recipe_name("blockwise")
    trained = float8.convert_to_float8_training(
        model_of("qwen3", seed=1),
        config=config,
        module_filter_fn=float8.filters.skip_names("*lm_head"),
    )
    save_pretrained(trained, tmp_path / "saved")
    again = load(model_of("qwen3", seed=2), tmp_path / "saved", "training", config=config)
    assert_bitwise(logits(again), logits(trained))
    resident = load(model_of("qwen3", seed=2), tmp_path / "saved", "float8")
    assert_bitwise(logits(resident), logits(trained))


def test_transformers_refuses_a_state_dict_of_float8_weights(tmp_path):
    """Which it would load without the scales, if the float8 data had the shape of the weight."""
    model = float8.convert_to_float8_inference(model_of("llama"))
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    with pytest.raises(RuntimeError, match=r"(?s)mismatch.*\[64, 64, 1\]|size mismatch|mismatched"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_its_state_dict_beside_a_config_is_refused_with_the_fix(tmp_path):
    config = Float8LinearConfig.from_recipe_name("blockwise")
    model = float8.convert_to_float8_inference(nn.Sequential(nn.Linear(32, 48)), config=config)
    save_pretrained(model, tmp_path / "own")
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = {k.replace("_scale", "_scale_inv"): v for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "own" / "model.safetensors")
    with pytest.raises(ValueError, match=r"\(48, 32, 1\).*a state_dict of this library"):
        load(nn.Sequential(nn.Linear(32, 48)), tmp_path / "own")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_of_peft_train_on_it_and_merge_after_dequantising(stored, tmp_path):
    import peft

    kind, folder, _, layers = stored
    base = load(model_of(kind, seed=2, dtype=torch.float32), folder, "float8")
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.0)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted = logits(model.eval())
    with pytest.raises(NotImplementedError, match="convert_from_float8_training"):
        model.merge_and_unload()
    plain = float8.convert_from_float8_training(model)
    assert not any(isinstance(m, Float8Linear) for m in plain.modules())
    with torch.no_grad():
        unmerged = logits(plain)
    merged = plain.merge_and_unload()
    assert_sqnr_at_least(logits(merged), unmerged, 90)
    assert_sqnr_at_least(logits(merged), adapted, 20)
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert_bitwise(logits(again), logits(merged))
    assert len(layers) == 14
