"""`Rewriting`: a checkpoint in another layout, without a model, one tensor at a time.

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
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.checkpoints.casts import RECAST, StoredLayer, stored_layer
from float8.checkpoints.files import INDEX_SUFFIX, SUFFIX, Spec, write_shards
from float8.checkpoints.layouts import Layout
from float8.checkpoints.plan import plan_of
from float8.checkpoints.source import WEIGHT, Source, told
from float8.formats import FORMATS, HIGH_PRECISION_DTYPES
from float8.granularity import WHOLE
from float8.tensor import Float8Tensor

# Names of modules whose matrices stay in high precision.
SKIP = ("*embed*", "*wte", "*wpe", "*lm_head", "*.gate", "*router*", "*score", "*classifier")
_SKIPPED, _IN_SOURCE = "its name is skipped", "the source has it in high precision"
_CONFIGS = ("config.json", "hf_quant_config.json")
# What is not copied beside the new tensors.
_LEFT_OUT = (SUFFIX, INDEX_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".pkl", *_CONFIGS)


class Rewriting:
    """A checkpoint in another layout, planned; headers and scales of the source are read.

    A dtype as ``target``, bfloat16, float16 or float32, means high precision. ``skip`` has patterns
    of modules whose weights stay in high precision, `SKIP` by default. It is for a source in high
    precision only: one in float8 keeps its choice. Raises ValueError if the target cannot store
    some layers, or if ``skip`` does not fit the source.

    Attributes:
        plan: what the result will be.
    """

    def __init__(
        self,
        source: Source,
        target: Layout | torch.dtype,
        skip: Sequence[str] | None,
        max_shard_bytes: float,
    ) -> None:
        self.source, self.target = source, target
        self.layers: dict[str, StoredLayer] = {}
        self._make: list[Callable[[], Mapping[str, Tensor]]] = []
        layout = target if isinstance(target, Layout) else None
        names = _float8_names(source, target, skip)
        skipped: dict[str, str] = {}
        specs: dict[str, Spec] = {}
        problems = []
        for key, spec in source.weights.items():
            name = key.removesuffix(WEIGHT)
            if layout is not None and key.endswith(WEIGHT) and name in names:
                weight, scale = None, None
                if name in source.layers:
                    weight, scale = source.layer(name, torch.float32)
                scale = scale if layout.static_inputs else None
                layer = stored_layer(name, spec.shape, weight, layout, scale, None, recast=True)
                if isinstance(layer, str):
                    problems.append(f"{name}: {layer}")
                    continue
                self.layers[name], make = layer, partial(self._cast, layer)
                specs |= layer.specs
            else:
                is_plain = spec.dtype in HIGH_PRECISION_DTYPES or spec.dtype in FORMATS
                dtype = target if isinstance(target, torch.dtype) and is_plain else spec.dtype
                specs[key], make = Spec(dtype, spec.shape), partial(self._copy, key, dtype)
                if key.endswith(WEIGHT) and len(spec.shape) == 2 and layout is not None:
                    skipped[name] = _IN_SOURCE if source.layers else _SKIPPED
            self._make.append(make)
        if problems:
            raise ValueError(told(f"{source.path} cannot be stored as {target}", problems))
        if layout is not None and "lm_head.weight" not in specs:
            skipped["lm_head"] = "it has the weight of the embedding, if there is one"
        how = {name: layer.how for name, layer in self.layers.items()}
        self.plan = plan_of(layout, self.layers, how, skipped, specs, max_shard_bytes)
        again = [*how.values()].count(RECAST)
        if again:
            self.plan.notes.append(
                f"{again} weights are dequantised and cast again, so their values are rounded "
                "twice; a checkpoint in high precision gives better ones"
            )
        has_inputs = source.layout is not None and source.layout.static_inputs
        if has_inputs and not (layout is not None and layout.static_inputs):
            self.plan.notes.append("the static scales of inputs are left out")

    def report(self) -> dict[str, Any]:
        """The plan, for JSON."""
        fields = ("layers", "skipped", "files", "nbytes", "quantization_config", "notes")
        own = {"source": str(self.source.path), "target": str(self.target)}
        return own | {name: getattr(self.plan, name) for name in fields}

    def write(self, folder: str | Path, overwrite: bool) -> None:
        """Write the result to a folder, which appears when all of it is on the disk.

        See `write_shards`.
        """
        tensors = (entry for make in self._make for entry in make().items())
        write_shards(folder, self.plan.tensors, tensors, files=self._files(), overwrite=overwrite)

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
                config[name] = str(self.target).removeprefix("torch.")
        else:
            config["quantization_config"] = self.plan.quantization_config
            configs |= self.target.other_files(self.plan.quantization_config)
        return files | {name: json.dumps(c, indent=2) + "\n" for name, c in configs.items() if c}

    def _copy(self, key: str, dtype: torch.dtype) -> dict[str, Tensor]:
        x = self.source.read(key, torch.float32)
        made = x.dequantize(dtype) if isinstance(x, Float8Tensor) else x.to(dtype)
        if made.dtype == torch.float16 != x.dtype and not bool(made.isfinite().all()):
            place = self.source.place(key)
            raise ValueError(f"{place}: it has values that float16 does not hold")
        return {key: made}

    def _cast(self, layer: StoredLayer) -> dict[str, Tensor]:
        def read(each: StoredLayer) -> Tensor:
            return self.source.read(each.name + WEIGHT, torch.float32)

        def amax(each: StoredLayer) -> Tensor:
            x = read(each)
            x = x.dequantize() if isinstance(x, Float8Tensor) else x
            return kernels.amax(x, (WHOLE, WHOLE))

        return layer.tensors(read(layer), layer.shared_scale(self.layers, amax))


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
