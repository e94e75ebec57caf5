"""Decoder layers of Transformers, whole: a layer of Qwen3-30B-A3B and one of gpt-oss-20b.

`PublishedLayer` calls the layer as its model does, with rotary positions, and causal attention but
for gpt-oss's eager one, which gets no mask and takes the same time: (B, T, C) -> (B, T, C). The
sizes are Transformers' defaults of the two configs, which are those of the published models
(gpt-oss with 32 experts); `toy` has few small experts.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from torch import Tensor, arange, nn

from benchmarks.models.transformer import Sizes

# name -> file of Transformers, the prefix of its classes, what differs from the config's defaults
_SOURCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-moe": (
        "qwen3_moe",
        "Qwen3Moe",
        {"moe_intermediate_size": 768, "num_experts": 128, "head_dim": 128},
    ),
    "gpt-oss": ("gpt_oss", "GptOss", {"num_local_experts": 32}),
}
PUBLISHED = {
    "qwen3-moe": Sizes(1, 2048, 32, 4096, 4, batch=2),
    "gpt-oss": Sizes(1, 2880, 45, 2048, 9, batch=4),
}
_TOY = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "moe_intermediate_size": 64, "num_experts": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


def sizes_of(name: str, toy: bool) -> Sizes:
    """Of the layer and of a batch."""
    return replace(PUBLISHED[name], width=128, heads=4, context=64) if toy else PUBLISHED[name]


class PublishedLayer(nn.Module):
    """A decoder layer, with the rotary positions of its model."""

    def __init__(self, name: str, toy: bool) -> None:
        super().__init__()
        file, prefix, changes = _SOURCES[name]
        models: Any = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
        configs: Any = importlib.import_module(f"transformers.models.{file}")
        config = getattr(configs, f"{prefix}Config")(**changes | (_TOY if toy else {}))
        config._attn_implementation = "eager" if name == "gpt-oss" else "sdpa"  # sinks
        config._experts_implementation = "grouped_mm"  # not a loop over experts
        self.layer = getattr(models, f"{prefix}DecoderLayer")(config, 0)
        self.rotary = getattr(models, f"{prefix}RotaryEmbedding")(config)
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, h_BTC: Tensor) -> Tensor:
        positions = arange(h_BTC.shape[1], device=h_BTC.device).unsqueeze(0)
        embeddings = self.rotary(h_BTC, positions)
        out = self.layer(h_BTC, position_embeddings=embeddings, position_ids=positions)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found
