"""What of a model of Transformers is converted: its body; and all of it evaluates alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

import torch
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

from float8.config import RECIPES
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
