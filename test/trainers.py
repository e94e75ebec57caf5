"""A small Llama, data and a Trainer of Transformers, for the tests of `Float8Callback`."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LAYERS = 7  # linear ones of the Llama's block


@pytest.fixture(autouse=True, scope="module")
def short_collections():
    """Each ``train()`` collects garbage; half of its time goes by among the objects of torch."""
    gc.freeze()
    yield
    gc.unfreeze()


def llama_config(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes, **options)


def llama(seed=0, **options):
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**options))


def data_of(rows=32):
    tokens = torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(folder, model, callback, optimizers=(None, None), **options):
    metrics = options.pop("compute_metrics", None)
    options = {
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return Trainer(
        model,
        TrainingArguments(str(folder), **options),
        train_dataset=data_of(),
        eval_dataset=data_of(8),
        callbacks=[callback] if callback else [],
        optimizers=optimizers,
        compute_metrics=metrics,
    )
