"""`rewriting`: a checkpoint in another layout, without a model, one tensor at a time.

The source is in high precision or in any layout that is readable, and so is the result. What
happens to the weight of a linear layer:

- *kept*: the source has it in float8, with scales that the new layout stores: the same bits;
- *cast*: from high precision, once, by the definition;
- *cast again*: float8 of another granularity is dequantised and cast, so values are rounded twice;
- *dequantised*: the result is in high precision.

All other tensors are copied; where the result is in high precision, in its dtype. Which weights
are those of linear layers a float8 checkpoint says itself. Of one in high precision they are all
matrices ``NAME.weight`` whose name no pattern of ``skip`` matches: embeddings, heads and routers by
default.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from float8.checkpoints.casts import StoredLayer, stored_layer
from float8.checkpoints.files import INDEX_SUFFIX, SUFFIX, Spec
from float8.checkpoints.layouts import COMPRESSED_TENSORS, WEIGHT, Layout
from float8.checkpoints.plan import Writing
from float8.checkpoints.source import Source
from float8.formats import FORMATS, HIGH_PRECISION_DTYPES

# Names of modules whose matrices stay in high precision.
SKIP = ("*embed*", "*wte", "*wpe", "*lm_head", "*.gate", "*router*", "*score", "*classifier")
_SKIPPED, _IN_SOURCE = "its name is skipped", "the source has it in high precision"
_CONFIGS = ("config.json", "hf_quant_config.json")
# What is not copied beside the new tensors.
_LEFT_OUT = (SUFFIX, INDEX_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".pkl", *_CONFIGS)


def rewriting(
    source: Source, target: Layout | torch.dtype, skip: Sequence[str] | None, max_shard_bytes: float
) -> Writing:
    """A checkpoint in another layout; headers and scales of the source are read.

    A dtype as ``target``, bfloat16, float16 or float32, means high precision. ``skip`` has patterns
    of modules whose weights stay in high precision, `SKIP` by default. It is for a source in high
    precision only: one in float8 keeps its choice. Raises ValueError if the target cannot store
    some layers, or if ``skip`` does not fit the source.
    """
    layout = target if isinstance(target, Layout) else None
    matrices = {
        key.removesuffix(WEIGHT): spec
        for key, spec in source.weights.items()
        if key.endswith(WEIGHT) and len(spec.shape) == 2
    }
    names = [name for name, spec in matrices.items() if spec.dtype in HIGH_PRECISION_DTYPES]
    free = [] if source.layers or layout is None else names
    for pattern in skip or ():
        if not any(fnmatchcase(name, pattern) for name in free):
            raise ValueError(
                f"skip: {pattern!r} is the name of no weight in high precision that becomes float8;"
                " a checkpoint in float8 keeps its choice of layers"
            )
    patterns = SKIP if skip is None else skip
    in_float8 = set(source.layers) or {
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    methods = [each.method for each in (source.layout, layout) if each is not None]
    is_llama4 = '"model_type": "llama4' in json.dumps(source.model_config)
    if is_llama4 and methods.count(COMPRESSED_TENSORS) == 1:
        raise ValueError(
            "readers take Llama 4's experts as matrices from compressed-tensors alone, and else as "
            "stacks: use float8.checkpoints.load and save_pretrained"
        )
    layers: dict[str, StoredLayer | str] = {}
    skipped: dict[str, str] = {}
    left: set[str] = set()
    specs = {key: replace(spec, file="") for key, spec in source.weights.items()}
    if isinstance(target, torch.dtype):
        for key, spec in specs.items():
            if spec.dtype in HIGH_PRECISION_DTYPES or spec.dtype in FORMATS:
                specs[key] = Spec(target, spec.shape)
    if layout is not None:
        why = _IN_SOURCE if source.layers else _SKIPPED
        skipped = {name: why for name in matrices if name not in in_float8}
        if "lm_head.weight" not in specs:
            skipped["lm_head"] = "it has the weight of the embedding, if there is one"
        for key, spec in specs.items():
            if len(spec.shape) == 3 and "expert" in key and key not in source.layers:
                skipped[key.removesuffix(WEIGHT)] = "it is a stack of experts"
                left.add(layout.all_of(key.removesuffix(WEIGHT).rpartition(".")[0]))
        layers |= dict.fromkeys(source.layers.keys() - matrices, "it is a stack of experts")
        for name, spec in matrices.items():
            if name in in_float8:
                weight, scale = source.layer(name) if name in source.layers else (None, None)
                scale = scale if layout.static_inputs else None
                layers[name] = stored_layer(name, spec.shape, weight, layout, scale, None)
    read, config = source.read, source.model_config
    return Writing(layout, specs, layers, skipped, max_shard_bytes, read, config, left)


def files_beside(
    source: Source, target: Layout | torch.dtype, quantization_config: dict[str, Any]
) -> dict[str, bytes | dict[str, Any]]:
    """The files beside the tensors: those of the source, and configs with what has changed."""
    beside = [file for file in sorted(source.folder.iterdir()) if file.is_file()]
    files: dict[str, bytes | dict[str, Any]] = {
        file.name: file.read_bytes() for file in beside if not file.name.endswith(_LEFT_OUT)
    }
    config = {k: v for k, v in source.model_config.items() if k != "quantization_config"}
    configs = {_CONFIGS[0]: config}
    if isinstance(target, torch.dtype):
        for name in {"dtype", "torch_dtype"} & config.keys():
            config[name] = str(target).removeprefix("torch.")
    else:
        config["quantization_config"] = quantization_config
        configs |= target.other_files(quantization_config)
    return files | {name: content for name, content in configs.items() if content}
