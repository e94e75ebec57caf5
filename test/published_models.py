"""Tiny models of Transformers whose files have other names and shapes than their parameters."""

from __future__ import annotations

import inspect

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
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
    "llama4": lambda **own: Llama4ForCausalLM(  # files have its experts as stacks, or as matrices
        Llama4TextConfig(num_local_experts=4, **MOE | {"intermediate_size": 64} | own)
    ),
    "phimoe": lambda **own: PhimoeForCausalLM(  # files have its routers under other names
        PhimoeConfig(**MOE | {"num_local_experts": 4} | own)
    ),
}  # fmt: skip

LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
HYBRID = {  # with layers of other kinds than attention
    "bailing_hybrid": {},
    "granitemoehybrid": {"layer_types": ["attention", "mamba"], "mamba_n_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe_text": LINEAR,
}
# Other mixtures, by the names of their configs; of the classes in ``transformers/models`` all that
# are causal language models, and run on a CPU with the sizes below.
MIXTURES = (
    "afmoe", "aria_text", "axk1", "axk2", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v32",
    "deepseek_v4", "doge", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling_text", "jetmoe", "kolibri1",
    "laguna", "longcat_flash", "mellum", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "olmoe",
    "qwen2_moe", "solar_open", *HYBRID,
)  # fmt: skip
TINY = MOE | {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "first_k_dense_replace": 1, "moe_layer_start_index": 1, "num_dense_layers": 1, "num_layers": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 32, "dense_intermediate_size": 32, "top_k_experts": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "o_groups": 2,
    "o_lora_rank": 16, "hc_mult": 2, "zero_expert_num": 0, "sliding_window": 16,
    "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def mixture_of(name: str) -> torch.nn.Module:
    """One of `MIXTURES`, in float32, with random weights."""
    kind = CONFIG_MAPPING[name]
    torch.manual_seed(0)
    own = {key: x for key, x in TINY.items() if key in inspect.signature(kind).parameters}
    own |= HYBRID.get(name, {})
    model = AutoModelForCausalLM.from_config(kind(**own)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model


def model_of(name: str, seed: int = 0, **sizes: int) -> torch.nn.Module:
    """In float32; the same weights at each call; elements of biases and norms differ."""
    torch.manual_seed(seed)
    model = MODELS[name](**sizes).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) / 8)
    return model


def convert(
    model: torch.nn.Module, config: str | float8.Float8LinearConfig = "rowwise"
) -> torch.nn.Module:
    """In place, all but the head."""
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=filters.skip_names("lm_head")
    )
