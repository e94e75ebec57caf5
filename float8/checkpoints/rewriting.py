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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.checkpoints.casts import (
    STORED,
    TENSORWISE,
    WeightCast,
    cast_anew,
    largest,
    sharing,
    stores,
)
from float8.checkpoints.files import (
    INDEX_SUFFIX,
    MAX_SHARD_BYTES,
    SUFFIX,
    Spec,
    in_files,
    specs_of,
    write_shards,
)
from float8.checkpoints.inspection import size
from float8.checkpoints.layouts import TRANSFORMERS, Layer, Layout, transformers_refuses
from float8.checkpoints.source import WEIGHT, Source, told
from float8.formats import FORMATS, HIGH_PRECISION_DTYPES
from float8.tensor import Float8Tensor

# Names of modules whose matrices stay in high precision.
SKIP = ("*embed*", "*wte", "*wpe", "*lm_head", "*.gate", "*router*", "*score", "*classifier")
KEPT, CAST, AGAIN = "float8 data kept", "cast from high precision", "dequantised and cast again"
DEQUANTISED, OTHER_DTYPE, COPIED = "dequantised", "converted to this dtype", "copied"
_HOW = (KEPT, CAST, AGAIN, DEQUANTISED, OTHER_DTYPE, COPIED)
_CONFIGS = ("config.json", "hf_quant_config.json")
# What is not copied beside the new tensors.
_LEFT_OUT = (SUFFIX, INDEX_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".pkl", *_CONFIGS)


@dataclass
class Rewriting:
    """What a rewritten checkpoint will be; nothing has been written.

    Attributes:
        source: what is read.
        target: the layout, or the dtype of a result in high precision.
        specs: key -> dtype and shape of the result.
        how: weight -> what happens to it, one of the constants of this module.
        notes: what a user should know.
    """

    source: Source
    target: Layout | torch.dtype
    specs: dict[str, Spec] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    make: dict[str, Callable[[], dict[str, Tensor]]] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": str(self.source.path),
            "source_layout": _text(self.source.layout),
            "target": _text(self.target),
            "nbytes": sum(spec.nbytes for spec in self.specs.values()),
            "weights": self.how,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        before, after = (
            size(sum(spec.nbytes for spec in specs.values()))
            for specs in (self.source.specs, self.specs)
        )
        lines = [f"{self.source.path}: {before}, {_text(self.source.layout)}"]
        lines += [f"as {_text(self.target)}: {after}"]
        counts = Counter(self.how.values())
        lines += [f"  {counts[how]} tensors: {how}" for how in _HOW if how in counts]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def write(
        self,
        folder: str | Path,
        *,
        max_shard_bytes: float = MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """Write the result to a folder, which appears when all of it is on the disk.

        See `write_shards`. Raises ValueError if the folder is that of the source.
        """
        if Path(folder).resolve() == self.source.folder.resolve():
            raise ValueError(f"{folder}: it is the folder that is read; give another name")
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
            for field_ in {"dtype", "torch_dtype"} & config.keys():
                config[field_] = _text(self.target)
        else:
            in_float8 = [key.removesuffix(WEIGHT) for key, how in self.how.items() if how != COPIED]
            skipped = [
                key.removesuffix(WEIGHT)
                for key in self._copied()
                if key.endswith(WEIGHT) and len(self.specs[key].shape) == 2
            ]
            if "lm_head.weight" not in self.specs:  # tied to the embedding
                skipped.append("lm_head")
            own = self.target.quantization_config(in_float8, skipped)
            config["quantization_config"] = own
            configs |= self.target.other_files(own)
        return files | {name: json.dumps(c, indent=2) + "\n" for name, c in configs.items() if c}

    def _copied(self) -> Iterator[str]:
        return (key for key, how in self.how.items() if how == COPIED)


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
    if skip is not None and (source.layers or isinstance(target, torch.dtype)):
        raise ValueError(
            "skip is for a checkpoint in high precision that becomes float8; layers of one in "
            "float8 are known"
        )
    has_inputs = source.layout is not None and source.layout.static_inputs
    if isinstance(target, Layout) and target.static_inputs and not has_inputs:
        raise ValueError(
            f"{source.path} has no scales of inputs, which {_text(target)} stores; take a layout "
            "with dynamic inputs, or save a model with the scales that float8.calibrate finds"
        )
    layers = set(source.layers) or _linear(source.weights, skip)
    if isinstance(target, torch.dtype):
        for key, spec in source.weights.items():
            in_float8 = spec.dtype in FORMATS
            is_other = in_float8 or spec.dtype in HIGH_PRECISION_DTYPES
            _plan_copy(found, key, target if is_other else spec.dtype, in_float8)
    else:
        casts = {name: _cast(source, target, name) for name in layers}
        problems = []
        for key, spec in source.weights.items():
            name = key.removesuffix(WEIGHT)
            if not key.endswith(WEIGHT) or name not in layers:
                _plan_copy(found, key, spec.dtype)
                continue
            empty = target.without_data(name, spec.shape, _input_scale(source, target, name))
            if (reason := target.refuses(empty)) is not None:
                problems.append(f"{name}: {reason}")
                continue
            found.specs |= specs_of(target.tensors(empty))
            is_stored = casts[name].operand is None
            found.how[key] = KEPT if is_stored else AGAIN if name in source.layers else CAST
        if problems:
            raise ValueError(told(f"{source.path} cannot be stored as {_text(target)}", problems))
        _plan_layers(found, target, casts)
    found.notes = list(_notes(found))
    return found


def _text(form: Layout | torch.dtype | None) -> str:
    return "high precision" if form is None else str(form).removeprefix("torch.")


def _linear(weights: dict[str, Spec], skip: Sequence[str] | None) -> set[str]:
    """The names of the linear layers of a checkpoint in high precision."""
    names = {
        key.removesuffix(WEIGHT)
        for key, spec in weights.items()
        if key.endswith(WEIGHT) and len(spec.shape) == 2 and spec.dtype in HIGH_PRECISION_DTYPES
    }
    for pattern in skip or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"skip: no weight has a name that {pattern!r} matches")
    patterns = SKIP if skip is None else skip
    return {n for n in names if not any(fnmatchcase(n, pattern) for pattern in patterns)}


def _plan_copy(found: Rewriting, key: str, dtype: torch.dtype, in_float8: bool = False) -> None:
    spec = found.source.weights[key]

    def make() -> dict[str, Tensor]:
        x = found.source.read(key, torch.float32)
        made = x.dequantize(dtype) if isinstance(x, Float8Tensor) else x.to(dtype)
        if made.dtype == torch.float16 != spec.dtype and not bool(made.isfinite().all()):
            raise ValueError(f"{found.source.place(key)}: it has values that float16 does not hold")
        return {key: made}

    found.specs[key] = Spec(dtype, spec.shape)
    found.how[key] = DEQUANTISED if in_float8 else COPIED if dtype == spec.dtype else OTHER_DTYPE
    found.make[key] = make


# --- layers in float8


def _input_scale(source: Source, target: Layout, name: str) -> Tensor | None:
    return source.layer(name, torch.float32).input_scale if target.static_inputs else None


def _cast(source: Source, target: Layout, name: str) -> WeightCast:
    """How one layer becomes float8 of the target: its bits, or a cast."""
    if name in source.layers:
        weight = source.layer(name, torch.float32).weight
        if stores(target, weight, _input_scale(source, target, name)) is None:
            return WeightCast(STORED, target.scale_format)
    return cast_anew(target)


def _plan_layers(found: Rewriting, target: Layout, casts: dict[str, WeightCast]) -> None:
    def weight(name: str) -> Tensor:
        return found.source.read(name + WEIGHT, torch.float32)

    def amax(name: str) -> Tensor:
        x = weight(name)
        return kernels.amax(x.dequantize() if isinstance(x, Float8Tensor) else x, TENSORWISE)

    @cache
    def shared(group: tuple[str, ...]) -> Tensor:
        return largest(casts[name].scale(partial(amax, name)) for name in group)

    def make(name: str) -> dict[str, Tensor]:
        group = sharing(name, casts, target)
        cast = casts[name].of(weight(name), shared(tuple(group)) if group else None)
        layer = Layer(name, cast, _input_scale(found.source, target, name))
        if (reason := target.refuses(layer)) is not None:  # NaN or inf in the source
            raise ValueError(f"{found.source.place(name + WEIGHT)}: {reason}")
        return target.tensors(layer)

    planned = found.make | {name + WEIGHT: partial(make, name) for name in casts}
    found.make = {key: planned[key] for key in found.how}  # in the order of the specs


def _notes(found: Rewriting) -> Iterator[str]:
    target, layout, how = found.target, found.source.layout, Counter(found.how.values())
    if how[AGAIN]:
        yield (
            f"{how[AGAIN]} weights are dequantised and cast again, so their values are rounded "
            "twice; a checkpoint in high precision gives better ones"
        )
    stays = isinstance(target, Layout) and target.static_inputs
    if layout is not None and layout.static_inputs and not stays:
        yield "the static scales of inputs are left out"
    if isinstance(target, torch.dtype):
        return
    shapes = {
        k.removesuffix(WEIGHT): found.specs[k].shape for k, h in found.how.items() if h != COPIED
    }
    if (reason := transformers_refuses(target, shapes)) is not None:
        yield f"not read by {TRANSFORMERS}: {reason}"
    kept = [key for key in found._copied() if len(found.specs[key].shape) > 1]
    if not found.source.layers and not how[CAST]:
        yield "no weight becomes float8: all names are skipped"
    if not found.source.layers and kept:
        shown = ", ".join(kept[:8]) + (f", ... ({len(kept)} in all)" if len(kept) > 8 else "")
        yield f"left in high precision: {shown}"
