"""The files of a checkpoint beside its tensors: ``config.json``, ``generation_config.json``.

A model of HuggingFace's Transformers has a config, which is written as its own ``save_pretrained``
writes it, with ``quantization_config`` added. Of any other model the file has that entry alone.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from torch import nn

from float8.checkpoints.float8_layers import transformers_config, unwrapped
from float8.checkpoints.weights import Checkpoint


def files_beside(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """File name -> text, of the files beside a checkpoint; the model is not changed."""
    layout, names = checkpoint.layout, (checkpoint.layers, checkpoint.skipped)
    others = {name: _json(content) for name, content in layout.other_files(*names).items()}
    return others | _configs(model, checkpoint.config)


def _configs(model: nn.Module, quantization_config: dict[str, Any]) -> dict[str, str]:
    plain: Any = unwrapped(model)
    config = transformers_config(model)
    if config is None:
        return {"config.json": _json({"quantization_config": quantization_config})}
    own = copy.deepcopy(config)
    own.architectures = [type(plain).__name__.removeprefix("FSDP")]  # which fully_shard adds
    own.dtype = str(plain.dtype).removeprefix("torch.")
    own.quantization_config = quantization_config
    files = {"config.json": own.to_json_string()}
    generation = getattr(plain, "generation_config", None)
    if generation is not None and plain.can_generate():
        files["generation_config.json"] = generation.to_json_string()
    return files


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
