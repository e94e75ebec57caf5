"""What of a model of Transformers is converted: its body; and all of it evaluates alike."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from safetensors.torch import load_file
from torch import nn
from trainers import (  # noqa: F401
    LAYERS,
    data_of,
    llama,
    short_collections,
    trainer_of,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

import float8
from float8.config import RECIPES
from float8.convert.filters import Because
from float8.integrations.transformers import Float8Callback, convert


def test_leaves_out_heads_tied_or_not_and_what_tensor_cores_refuse():
    model = convert(llama(tie_word_embeddings=True))
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(model.float8_conversion.converted) == LAYERS
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    config = BertConfig(num_hidden_layers=1, intermediate_size=56, num_labels=16, **sizes)
    for pads in (False, True):
        recipe = replace(RECIPES["tensorwise"], pad_inner_dim=pads)
        done = convert(BertForSequenceClassification(config), recipe).float8_conversion
        parts = {"intermediate.dense", "output.dense"}
        narrow = {f"bert.encoder.layer.0.{part}" for part in parts}
        left = {"bert.pooler.dense", "classifier"} | (set() if pads else narrow)
        assert done.skipped.keys() == left
        assert "outside of the model's body" in done.skipped["classifier"]
        assert "too small to gain" in done.skipped["bert.pooler.dense"]
        assert len(done.converted) == 6 - (0 if pads else 2)


def test_an_encoder_generates_in_high_precision_too(tmp_path):
    """`generate` calls it by itself."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    ).eval()
    tokens = data_of(2)[1]["input_ids"][None]

    def scores():
        options = {"max_new_tokens": 3, "output_scores": True, "return_dict_in_generate": True}
        return torch.stack(model.generate(tokens, **options).scores)

    expected, counts = scores(), []
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="no",
        predict_with_generate=True, generation_max_length=4, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, arguments, train_dataset=data_of(), eval_dataset=data_of(4),
        callbacks=[Float8Callback("delayed")],
        compute_metrics=lambda p: counts.append(len(p.predictions)) or {},
    )  # fmt: skip
    assert model.float8_conversion.converted[0].startswith("encoder.")
    assert torch.equal(scores(), expected)
    trainer.train()
    assert counts == [4, 4]


class Wrapper(nn.Sequential):
    """As ``SentenceTransformer``: it saves by the ``save_pretrained`` of its first module."""

    @property
    def _keys_to_ignore_on_save(self):
        return []


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_model_inside_of_another_is_saved_without_histories(recipe, tmp_path):
    model = convert(Wrapper(llama().model), recipe)
    assert len(model.float8_conversion.converted) == LAYERS
    model[0].save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == llama().model.state_dict().keys()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        *({"init_lora_weights": name} for name in ("olora", "pissa", "pissa_niter_4")),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_adapters_that_read_the_weight_of_their_base_name_the_remedy(options):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["up_proj"], **options)
    with pytest.raises((NotImplementedError, ValueError), match="convert_from_float8_training"):
        peft.get_peft_model(float8.convert_to_float8_inference(llama()), lora)
    base = float8.convert_from_float8_training(float8.convert_to_float8_inference(llama()))
    model = peft.get_peft_model(base, lora)
    if "use_dora" not in options:  # which reads it in every step
        own = Because(lambda module, fqn: "an adapter" if "lora_" in fqn else None)
        model = float8.convert_to_float8_inference(model, module_filter_fn=own)
    tokens = data_of(2)[1]["input_ids"][None]
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad.any() for n, p in model.named_parameters() if "lora_B" in n)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_several_adapters_share_a_base_that_refuses_to_be_merged(recipe):
    peft = pytest.importorskip("peft")
    tokens = data_of(2)[1]["input_ids"][None]

    def logits(model, **options):
        with torch.no_grad():
            return model(tokens, **options).logits

    base = float8.convert_to_float8_inference(llama(), config=recipe).eval()
    options = {"r": 4, "target_modules": ["up_proj", "q_proj"], "init_lora_weights": False}
    found = {"none": logits(base)}
    model = peft.get_peft_model(base, peft.LoraConfig(**options), "first").eval()
    model.add_adapter("second", peft.LoraConfig(**options, use_rslora=True))
    for name in ("first", "second"):
        model.set_adapter(name)
        found[name] = logits(model)
    assert not torch.equal(found["first"], found["second"])
    model.set_adapter("first")

    def is_unchanged():
        with model.disable_adapter():
            assert_bitwise(logits(model), found["none"])
        assert_bitwise(logits(model), found["first"])
        assert_bitwise(logits(model, adapter_names=["second"]), found["second"])

    is_unchanged()
    for change in (
        model.merge_adapter,
        lambda: model.merge_adapter(safe_merge=True),
        model.merge_and_unload,
        lambda: model.add_adapter("third", peft.LoraConfig(**options, use_dora=True)),
    ):
        with pytest.raises(NotImplementedError, match="convert_from_float8_training"):
            change()
        is_unchanged()
    plain = float8.convert_from_float8_training(model)
    before, weights = logits(plain), copy.deepcopy(plain.state_dict())
    plain.merge_adapter()
    assert_sqnr_at_least(logits(plain), before, 90)
    plain.unmerge_adapter()
    for key, x in plain.state_dict().items():
        assert_sqnr_at_least(x, weights[key], 90)
