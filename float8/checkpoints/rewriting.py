"""`plan_rewriting`: a checkpoint in another layout, without a model, one tensor at a time.

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.checkpoints.casts import RECAST, StoredLayer, stored_layer
from float8.checkpoints.files import INDEX_SUFFIX, SUFFIX, Spec, in_files, size, write_shards
from float8.checkpoints.layouts import TRANSFORMERS, Layout, transformers_refuses
from float8.checkpoints.source import WEIGHT, Source, told
from float8.formats import FORMATS, HIGH_PRECISION_DTYPES
from float8.granularity import WHOLE
from float8.tensor import Float8Tensor

# Names of modules whose matrices stay in high precision.
SKIP = ("*embed*", "*wte", "*wpe", "*lm_head", "*.gate", "*router*", "*score", "*classifier")
DEQUANTISED, OTHER_DTYPE, COPIED = "dequantised", "converted to this dtype", "copied"
_CONFIGS = ("config.json", "hf_quant_config.json")
# What is not copied beside the new tensors.
_LEFT_OUT = (SUFFIX, INDEX_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".pkl", *_CONFIGS)


@dataclass
class Rewriting:
    """What a rewritten checkpoint will be; nothing has been written.

    Attributes:
        source: what is read.
        target: the layout, or the dtype of a result in high precision.
        layers: name -> the layers that are stored in float8.
        specs: key -> dtype and shape of the result.
        how: weight -> what happens to it: one of the constants of this module, or of `casts`.
        make: weight -> the tensors that it becomes.
    """

    source: Source
    target: Layout | torch.dtype
    layers: dict[str, StoredLayer] = field(default_factory=dict)
    specs: dict[str, Spec] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    make: dict[str, Callable[[], Mapping[str, Tensor]]] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": str(self.source.path),
            "source_layout": _text(self.source.layout),
            "target": _text(self.target),
            "nbytes": sum(spec.nbytes for spec in self.specs.values()),
            "weights": self.how,
            "notes": [*self.notes()],
        }

    def __str__(self) -> str:
        before, after = (
            size(sum(spec.nbytes for spec in specs.values()))
            for specs in (self.source.specs, self.specs)
        )
        lines = [f"{self.source.path}: {before}, {_text(self.source.layout)}"]
        lines += [f"as {_text(self.target)}: {after}"]
        counts = sorted(Counter(self.how.values()).items(), key=lambda item: item[0] == COPIED)
        lines += [f"  {count} tensors: {how}" for how, count in counts]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes())])

    def write(self, folder: str | Path, max_shard_bytes: float, overwrite: bool) -> None:
        """Write the result to a folder, which appears when all of it is on the disk.

        See `write_shards`.
        """
        tensors = (entry for make in self.make.values() for entry in make().items())
        specs = in_files(self.specs, max_shard_bytes)
        write_shards(folder, specs, tensors, files=self._files(), overwrite=overwrite)

    def _files(self) -> dict[str, str | bytes]:
        """The files beside the tensors: those of the source, and configs with what has changed."""
        beside = [file for file in sorted(self.source.folder.iterdir()) if file.is_file()]
        files: dict[str, str | bytes] = {
            file.name: file.read_bytes() for file in beside if not file.name.endswith(_LEFT_OUT)
        }
        path = self.source.folder / _CONFIGS[0]
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        config.pop("quantization_config", None)
        configs = {path.name: config}
        if isinstance(self.target, torch.dtype):
            for name in {"dtype", "torch_dtype"} & config.keys():
                config[name] = _text(self.target)
        else:
            matrices = (k for k in self._copied() if k.endswith(WEIGHT))
            skipped = [k.removesuffix(WEIGHT) for k in matrices if len(self.specs[k].shape) == 2]
            if "lm_head.weight" not in self.specs:  # tied to the embedding
                skipped.append("lm_head")
            config["quantization_config"] = self.target.quantization_config(self.layers, skipped)
            configs |= self.target.other_files(config["quantization_config"])
        return files | {name: json.dumps(c, indent=2) + "\n" for name, c in configs.items() if c}

    def _copied(self) -> Iterator[str]:
        return (key for key, how in self.how.items() if how == COPIED)

    def notes(self) -> Iterator[str]:
        """What a user should know."""
        how, layout = Counter(self.how.values()), self.source.layout
        if how[RECAST]:
            yield (
                f"{how[RECAST]} weights are dequantised and cast again, so their values are rounded"
                " twice; a checkpoint in high precision gives better ones"
            )
        stays = isinstance(self.target, Layout) and self.target.static_inputs
        if layout is not None and layout.static_inputs and not stays:
            yield "the static scales of inputs are left out"
        if isinstance(self.target, torch.dtype):
            return
        shapes = {name: layer.shape for name, layer in self.layers.items()}
        if (reason := transformers_refuses(self.target, shapes)) is not None:
            yield f"not read by {TRANSFORMERS}: {reason}"
        kept = [key for key in self._copied() if len(self.specs[key].shape) > 1]
        if not self.layers:
            yield "no weight becomes float8: all names are skipped"
        if not self.source.layers and kept:
            shown = ", ".join(kept[:8]) + (f", ... ({len(kept)} in all)" if len(kept) > 8 else "")
            yield f"left in high precision: {shown}"


def _text(form: Layout | torch.dtype | None) -> str:
    return "high precision" if form is None else str(form).removeprefix("torch.")


def plan_rewriting(
    source: Source, target: Layout | torch.dtype, skip: Sequence[str] | None = None
) -> Rewriting:
    """Plan a checkpoint in another layout; headers and scales are read.

    A dtype as ``target``, bfloat16, float16 or float32, means high precision. ``skip`` has patterns
    of modules whose weights stay in high precision, `SKIP` by default. It is for a source in high
    precision only: one in float8 keeps its choice. Raises ValueError if the target cannot store
    some layers, or if ``skip`` does not fit the source.
    """
    found = Rewriting(source, target)
    problems = []
    names = _float8_names(source, target, skip)
    for key, spec in source.weights.items():
        name = key.removesuffix(WEIGHT)
        if isinstance(target, torch.dtype) or not key.endswith(WEIGHT) or name not in names:
            is_plain = spec.dtype in HIGH_PRECISION_DTYPES or spec.dtype in FORMATS
            dtype = target if isinstance(target, torch.dtype) and is_plain else spec.dtype
            how = COPIED if dtype == spec.dtype else OTHER_DTYPE
            found.how[key] = DEQUANTISED if spec.dtype in FORMATS else how
            found.specs[key] = Spec(dtype, spec.shape)
            found.make[key] = partial(_copy, source, key, dtype)
            continue
        weight: Tensor = torch.empty(0)
        scale = None
        if name in source.layers:
            weight, scale = source.layer(name, torch.float32)
            scale = scale if target.static_inputs else None
        layer = stored_layer(name, spec.shape, weight, target, scale, None, recast=True)
        if isinstance(layer, str):
            problems.append(f"{name}: {layer}")
            continue
        found.layers[name], found.how[key] = layer, layer.how
        found.specs |= layer.specs
        found.make[key] = partial(_cast, found, layer)
    if problems:
        raise ValueError(told(f"{source.path} cannot be stored as {_text(target)}", problems))
    return found


def _float8_names(
    source: Source, target: Layout | torch.dtype, skip: Sequence[str] | None
) -> set[str]:
    """The names of the layers that become float8."""
    linear = {
        key.removesuffix(WEIGHT)
        for key, spec in source.weights.items()
        if key.endswith(WEIGHT) and len(spec.shape) == 2 and spec.dtype in HIGH_PRECISION_DTYPES
    }
    known = set() if source.layers or isinstance(target, torch.dtype) else linear
    unused = [p for p in skip or () if not any(fnmatchcase(name, p) for name in known)]
    if unused:
        raise ValueError(
            f"skip: {unused[0]!r} is the name of no weight in high precision that becomes float8; "
            "a checkpoint in float8 keeps its choice of layers"
        )
    patterns = SKIP if skip is None else skip
    return set(source.layers) or {
        name for name in linear if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _copy(source: Source, key: str, dtype: torch.dtype) -> dict[str, Tensor]:
    x = source.read(key, torch.float32)
    made = x.dequantize(dtype) if isinstance(x, Float8Tensor) else x.to(dtype)
    if made.dtype == torch.float16 != x.dtype and not bool(made.isfinite().all()):
        raise ValueError(f"{source.place(key)}: it has values that float16 does not hold")
    return {key: made}


def _cast(found: Rewriting, layer: StoredLayer) -> dict[str, Tensor]:
    def read(each: StoredLayer) -> Tensor:
        return found.source.read(each.name + WEIGHT, torch.float32)

    def amax(each: StoredLayer) -> Tensor:
        x = read(each)
        return kernels.amax(x.dequantize() if isinstance(x, Float8Tensor) else x, (WHOLE, WHOLE))

    return layer.tensors(read(layer), layer.shared_scale(found.layers, amax))
