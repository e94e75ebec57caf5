"""`load` into models of Transformers and Accelerate, and adapters of PEFT on what it loads."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace

import pytest
import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from torch import nn

import float8
from float8 import CastConfig, Float8Linear, Float8LinearConfig, Rowwise
from float8.checkpoints import load, save_pretrained

transformers = pytest.importorskip("transformers")
from published_models import convert, model_of  # noqa: E402

EXACT = replace(
    Float8LinearConfig.from_recipe_name("rowwise"),
    cast_config_input=CastConfig(granularity=Rowwise()),
)
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))


def saved(name: str, folder, recipe: str = "blockwise") -> nn.Module:
    """A converted model that is saved in float8."""
    source = convert(model_of(name, seed=1), recipe)
    save_pretrained(source, folder)
    return source


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("weights", ["high_precision", "float8", "converted"])
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_no_parameter_keeps_what_it_had(recipe, weights, tmp_path):
    """A model that starts as NaN: no expert, and nothing else, is left out."""
    source = saved("qwen3_moe", tmp_path, recipe)
    model = model_of("qwen3_moe", seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model = convert(model, recipe) if weights == "converted" else model
    load(model, tmp_path, "float8" if weights == "float8" else "high_precision")
    for name, expected in source.named_parameters():
        found = model.get_parameter(name)
        found = found.dequantize() if isinstance(found, float8.Float8Tensor) else found
        for own, its in zip(found.detach(), expected.detach(), strict=True):
            assert bool(((own - its).abs() <= its.abs() / 16 + 2**-9 * its.abs().max()).all()), name


@pytest.mark.parametrize(
    ("recipe", "same"),
    [
        ("tensorwise", False),
        ("rowwise", False),
        (EXACT, True),
        ("blockwise", True),
        ("mxfp8", True),
    ],
)
def test_a_file_has_the_trainers_numbers_if_inputs_are_cast_as_engines_cast_them(
    recipe, same, tmp_path
):
    """Engines cast tokens by the largest magnitude over 448, which is no power of two."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "tie_word_embeddings": False}
    plain = model_of("llama", **sizes).bfloat16()
    trainer = convert(copy.deepcopy(plain), recipe)
    save_pretrained(trainer, tmp_path)
    served = load(plain, tmp_path, "float8")
    assert torch.equal(logits(served), logits(trainer)) == same


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_of_peft_train_on_it_and_merge_after_dequantising(tmp_path):
    import peft

    saved("qwen3", tmp_path / "fp8")
    base = load(model_of("qwen3", seed=2), tmp_path / "fp8", "float8")
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
