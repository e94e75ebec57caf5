"""The files of a checkpoint beside its tensors: ``config.json``, ``generation_config.json``.

A model of HuggingFace's Transformers has a config, which is written as its own ``save_pretrained``
writes it, with ``quantization_config`` added. Of any other model the file has that entry alone.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from torch import nn

from float8.checkpoints.stacks import _WRAPPERS


def files_beside(model: nn.Module, quantization_config: dict[str, Any]) -> dict[str, str]:
    """File name -> text.

    Args:
        model: perhaps in wrappers; it is not changed.
        quantization_config: of the layout.
    """
    plain: Any = unwrapped(model)
    config: Any = getattr(plain, "config", None)
    if not hasattr(config, "to_json_string"):
        entry = {"quantization_config": quantization_config}
        return {"config.json": json.dumps(entry, indent=2) + "\n"}
    own = copy.deepcopy(config)
    own.architectures = [type(plain).__name__.removeprefix("FSDP")]  # which fully_shard adds
    own.dtype = str(plain.dtype).removeprefix("torch.")
    own.quantization_config = quantization_config
    files = {"config.json": own.to_json_string()}
    generation = getattr(plain, "generation_config", None)
    if generation is not None and plain.can_generate():
        files["generation_config.json"] = generation.to_json_string()
    return files


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers around it, as DistributedDataParallel and torch.compile's."""
    while (inside := _WRAPPERS.get(type(model).__name__)) is not None:
        model = model.get_submodule(inside)
    return model
