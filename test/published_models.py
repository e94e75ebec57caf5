"""Tiny models of Transformers whose files have other names and shapes than their parameters."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import float8
from float8 import filters

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.1, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
MOE = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 48}

MODELS = {
    "llama": lambda **own: LlamaForCausalLM(
        LlamaConfig(**SIZES | {"intermediate_size": 48, "tie_word_embeddings": True} | own)
    ),
    "qwen3": lambda **own: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"intermediate_size": 48} | own)),
    "mixtral": lambda **own: MixtralForCausalLM(  # gate and up have 48 rows each
        MixtralConfig(**MOE | {"num_local_experts": 3} | own)
    ),
    "qwen3_moe": lambda **own: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MOE | {"num_experts": 4} | own)
    ),
    "deepseek_v3": lambda **own: DeepseekV3ForCausalLM(  # a dense layer, one of experts
        DeepseekV3Config(
            n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
            n_shared_experts=1, **MOE | {"num_key_value_heads": 2} | own,
        )
    ),
    "gpt_oss": lambda **own: GptOssForCausalLM(
        GptOssConfig(
            num_local_experts=4, layer_types=["sliding_attention", "full_attention"],
            **MOE | {"intermediate_size": 32} | own,
        )
    ),
}  # fmt: skip


def model_of(name: str, seed: int = 0, **sizes: int) -> torch.nn.Module:
    """In float32; the same weights at each call; elements of biases and norms differ."""
    torch.manual_seed(seed)
    model = MODELS[name](**sizes).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) / 8)
    return model


def convert(model: torch.nn.Module, recipe: str = "rowwise") -> torch.nn.Module:
    """In place, all but the head."""
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=filters.skip_names("lm_head")
    )
