"""Checkpoints written by hand: by safetensors, with the oracle's casts, without the library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import oracle
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
FINE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def compressed(strategy: str, static: bool = False, **others: object) -> dict:
    """A quantization_config as llm-compressor writes it, with its fields that are None."""
    unset = dict.fromkeys(("actorder", "block_structure", "group_size", "observer"))
    common = unset | {"num_bits": 8, "type": "float", "symmetric": True}
    mx = {"group_size": 32, "scale_dtype": "torch.uint8"} if strategy == "group" else {}
    inputs = {"strategy": "group" if mx else "token", "dynamic": True, **mx}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": strategy, "dynamic": False, **mx},
        "input_activations": common
        | ({"strategy": "tensor", "dynamic": False} if static else inputs),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["gate", "head"],
        **others,
    }


def fine_grained(
    state: dict[str, Tensor],
    layers: Iterable[str],
    block: tuple[int, int] = (128, 128),
    scale_format: str = "float32",
) -> dict[str, Tensor]:
    """The tensors of a fine_grained checkpoint: ``layers`` in float8, all else as it is."""
    tensors = {key: value.detach().clone() for key, value in state.items()}
    for name in layers:
        data, scale = oracle.quantize(tensors[f"{name}.weight"], block, E4M3, scale_format)
        tensors[f"{name}.weight"] = data.view(E4M3)
        tensors[f"{name}.weight_scale_inv"] = scale
    return tensors


def dequantised(tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """The weight of a layer in float64, rounded once to a dtype."""
    data, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
    return oracle.values(data, scale, (128, 128)).to(dtype)


def write(
    folder: Path, tensors: dict[str, Tensor], config: dict | None = FINE, shards: int = 1
) -> Path:
    """Write a folder: ``config.json`` with a quantization_config, and shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({} if config is None else {"quantization_config": config})
    )
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {key: names[i % shards] for i, key in enumerate(tensors)}
    for name in names:
        save_file({k: v for k, v in tensors.items() if where[k] == name}, folder / name)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class Block(nn.Module):
    """Layers of unusual sizes, a norm, a bias, a buffer and a tied head."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(40, 144)
        self.up = nn.Linear(144, 272)
        self.norm = nn.LayerNorm(272)
        self.down = nn.Linear(272, 144, bias=False)
        self.gate = nn.Linear(144, 3, bias=False)
        self.head = nn.Linear(144, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(seed))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(self.norm(self.up(x)))
        return self.head(x * self.gate(x).softmax(-1).amax(-1, keepdim=True))


LAYERS = ("up", "down")


def tensors_of(model: nn.Module, layers: Iterable[str] = LAYERS) -> dict[str, Tensor]:
    """The tensors of a fine_grained checkpoint of a `Block`, whose head is tied."""
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    return fine_grained(state, layers)
