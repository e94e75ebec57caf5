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
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(intermediate_size=48, tie_word_embeddings=True, **SIZES)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(intermediate_size=48, **SIZES)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(num_local_experts=3, **MOE)  # 48 rows for each of gate and up
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, **MOE)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(  # a dense layer, one of experts
        DeepseekV3Config(
            n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
            n_shared_experts=1, **{**MOE, "num_key_value_heads": 2},
        )
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            num_local_experts=4, layer_types=["sliding_attention", "full_attention"],
            **{**MOE, "intermediate_size": 32},
        )
    ),
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """The same weights at each call; no two elements of biases and norms are equal."""
    torch.manual_seed(seed)
    model = MODELS[name]().to(dtype).eval()
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
