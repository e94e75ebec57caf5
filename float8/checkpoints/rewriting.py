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

Projections that engines fuse share one scale in layouts with a scale per tensor, as in ``save.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.checkpoints.inspection import Progress, layout_text, size
from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.readers import TRANSFORMERS, transformers_refuses
from float8.checkpoints.shard_writer import MAX_SHARD_BYTES, write_shards
from float8.checkpoints.shards import INDEX_SUFFIX, PICKLES, SUFFIX, Spec
from float8.checkpoints.source import WEIGHT, Source, told
from float8.checkpoints.weight_cast import CAST_ANEW, STORED, TENSORWISE, WeightCast
from float8.checkpoints.weights import fused_with
from float8.config import OperandCast, ScalingType
from float8.formats import E4M3, FORMATS, HIGH_PRECISION_DTYPES
from float8.tensor import Float8Tensor

# Names of modules whose matrices stay in high precision.
SKIP = ("*embed*", "*wte", "*wpe", "*lm_head", "*.gate", "*router*", "*score", "*classifier")
KEPT, CAST, AGAIN = "float8 data kept", "cast from high precision", "dequantised and cast again"
DEQUANTISED, OTHER_DTYPE, COPIED = "dequantised", "converted to this dtype", "copied"
_HOW = (KEPT, CAST, AGAIN, DEQUANTISED, OTHER_DTYPE, COPIED)
_CONFIGS = ("config.json", "hf_quant_config.json")
Entries = Callable[[], dict[str, Tensor]]


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
    make: dict[str, Entries] = field(default_factory=dict, repr=False)

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
        before = sum(spec.nbytes for spec in self.source.shards.keys().values())
        after = sum(spec.nbytes for spec in self.specs.values())
        lines = [f"{self.source.path}: {size(before)}, {_text(self.source.layout)}"]
        lines += [f"as {_text(self.target)}: {size(after)}"]
        counts = Counter(self.how.values())
        lines += [f"  {counts[how]} tensors: {how}" for how in _HOW if how in counts]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def write(
        self,
        folder: str | Path,
        *,
        max_shard_bytes: float = MAX_SHARD_BYTES,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Write the result to a folder, which appears when all of it is on the disk.

        See `write_shards`. ``progress`` is called with the number of weights that are done, the
        number of all, and the key. Raises ValueError if the folder is that of the source.
        """
        own = self.source.path if self.source.path.is_dir() else self.source.path.parent
        if Path(folder).resolve() == own.resolve():
            raise ValueError(f"{folder}: it is the folder that is read; give another name")
        tensors = self._tensors(progress)
        files = _files(own, self._configs(), self._dtype())
        write_shards(folder, self.specs, tensors, max_shard_bytes, files=files, overwrite=overwrite)

    def _tensors(self, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
        for done, (key, make) in enumerate(self.make.items()):
            if progress is not None:
                progress(done, len(self.make), key)
            yield from make().items()

    def _configs(self) -> dict[str, dict[str, Any]]:
        """File name -> what the target adds to it or puts there; empty in high precision."""
        if not isinstance(self.target, Layout):
            return {}
        in_float8 = [key.removesuffix(WEIGHT) for key, how in self.how.items() if how != COPIED]
        skipped = [
            key.removesuffix(WEIGHT)
            for key, spec in self.specs.items()
            if self.how.get(key) == COPIED and key.endswith(WEIGHT) and len(spec.shape) == 2
        ]
        if "lm_head.weight" not in self.specs:  # tied to the embedding
            skipped.append("lm_head")
        config = {"quantization_config": self.target.quantization_config(in_float8, skipped)}
        return {"config.json": config, **self.target.other_files(in_float8, skipped)}

    def _dtype(self) -> torch.dtype | None:
        return None if isinstance(self.target, Layout) else self.target


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
    if skip is not None and (source.layers or not isinstance(target, Layout)):
        raise ValueError(
            "skip is for a checkpoint in high precision that becomes float8: "
            + (f"{source.path} is in float8 and" if source.layers else "this one stays, and")
            + " its layers are known"
        )
    has_inputs = source.layout is not None and source.layout.static_inputs
    if isinstance(target, Layout) and target.static_inputs and not has_inputs:
        raise ValueError(
            f"{source.path} has no scales of inputs, which {_text(target)} stores; take a layout "
            "with dynamic inputs, or save a model with the scales that float8.calibrate finds"
        )
    weights = source.weights()
    layers = set(source.layers) or _linear(weights, SKIP if skip is None else skip)
    problems: list[str] = []
    planned: dict[str, _Cast] = {}
    for key, spec in weights.items():
        name = key.removesuffix(WEIGHT)
        is_layer = key.endswith(WEIGHT) and name in layers
        if not is_layer or not isinstance(target, Layout):
            _plan_high_precision(found, key, spec, is_layer and bool(source.layers))
            continue
        cast = _Cast(source, target, name, spec)
        if (reason := cast.refuses()) is not None:
            problems.append(f"{name}: {reason}")
            continue
        planned[name] = cast
        found.specs |= cast.specs()
        found.how[key] = cast.how
        found.make[key] = cast.tensors
    if problems:
        raise ValueError(told(f"{source.path} cannot be stored as {_text(target)}", problems))
    _share_scales(planned)
    _add_notes(found)
    return found


def _text(form: Layout | torch.dtype | None) -> str:
    if isinstance(form, Layout):
        return layout_text(form)
    return "high precision" if form is None else str(form).removeprefix("torch.")


def _linear(weights: dict[str, Spec], skip: Sequence[str]) -> set[str]:
    """The names of the linear layers of a checkpoint in high precision."""
    names = {
        key.removesuffix(WEIGHT)
        for key, spec in weights.items()
        if key.endswith(WEIGHT) and len(spec.shape) == 2 and spec.dtype in HIGH_PRECISION_DTYPES
    }
    left = {n for n in names if not any(fnmatchcase(n, pattern) for pattern in skip)}
    unused = [pattern for pattern in skip if skip is not SKIP and not any(
        fnmatchcase(n, pattern) for n in names
    )]  # fmt: skip
    if unused:
        raise ValueError(f"skip: no weight has a name that {unused[0]!r} matches")
    return left


def _plan_high_precision(found: Rewriting, key: str, spec: Spec, in_float8: bool) -> None:
    target, read = found.target, found.source.read
    to_dtype = not isinstance(target, Layout) and (in_float8 or spec.dtype in HIGH_PRECISION_DTYPES)
    dtype = target if to_dtype else spec.dtype
    assert isinstance(dtype, torch.dtype)

    def make() -> dict[str, Tensor]:
        x = read(key, torch.float32)
        made = x.dequantize(dtype) if isinstance(x, Float8Tensor) else x.to(dtype)
        if made.dtype == torch.float16 != spec.dtype and not bool(made.isfinite().all()):
            raise ValueError(f"{found.source.place(key)}: it has values that float16 does not hold")
        return {key: made}

    found.specs[key] = Spec(dtype, spec.shape)
    found.how[key] = DEQUANTISED if in_float8 else COPIED if dtype == spec.dtype else OTHER_DTYPE
    found.make[key] = make


class _Cast:
    """How one layer becomes the tensors of a layout."""

    def __init__(self, source: Source, target: Layout, name: str, spec: Spec) -> None:
        self.source, self.target, self.name, self.spec = source, target, name, spec
        self.scale: Callable[[], Tensor] | None = None  # that it shares with others
        self.input_scale: Tensor | None = None
        scale_format = target.scale_format
        block = target.granularity.block_of(spec.shape)
        operand = OperandCast(ScalingType.DYNAMIC, E4M3, block, scale_format)
        self.how, self.cast = CAST, WeightCast(CAST_ANEW, scale_format, operand)
        if spec.dtype in FORMATS:
            layer = self._layer()
            self.input_scale = layer.input_scale
            stored = WeightCast(STORED, scale_format)
            self.how = AGAIN
            if target.refuses(self._with(stored.of(layer.weight))) is None:
                self.how, self.cast = KEPT, stored

    def _layer(self) -> Layer:
        return self.source.layer(self.name, torch.float32)

    def _with(self, weight: Float8Tensor) -> Layer:
        return Layer(self.name, weight, self.input_scale if self.target.static_inputs else None)

    def _on_meta(self) -> Layer:
        scale = self.input_scale if self.target.static_inputs else None
        return self.target.layer_without_data(self.name, self.spec.shape, scale)

    def refuses(self) -> str | None:
        """The reason why the target cannot store the layer, or None."""
        return self.target.refuses(self._on_meta())

    def specs(self) -> dict[str, Spec]:
        tensors = self.target.tensors(self._on_meta())
        return {key: Spec(x.dtype, tuple(x.shape)) for key, x in tensors.items()}

    def weight(self) -> Tensor:
        """In high precision, or a `Float8Tensor`."""
        return self.source.read(self.name + WEIGHT, torch.float32)

    def own_scale(self) -> Tensor:
        """The scale of a tensorwise cast, from the weight's largest magnitude."""
        weight = self.weight()
        weight = weight.dequantize() if isinstance(weight, Float8Tensor) else weight
        return self.cast.scale(lambda: kernels.amax(weight, TENSORWISE))

    def tensors(self) -> dict[str, Tensor]:
        scale = None if self.scale is None else self.scale()
        layer = self._with(self.cast.of(self.weight(), scale))
        if (reason := self.target.refuses(layer)) is not None:  # NaN or inf in the source
            raise ValueError(f"{self.source.place(self.name + WEIGHT)}: {reason}")
        return self.target.tensors(layer)


def _share_scales(casts: dict[str, _Cast]) -> None:
    """Give the layers that engines fuse the largest of their scales, where each has one."""
    groups: dict[tuple[str, ...], list[_Cast]] = {}
    for name, cast in casts.items():
        if cast.how != KEPT and cast.cast.shares_scales and (names := fused_with(name)):
            groups.setdefault(names, []).append(cast)
    for members in groups.values():
        found: list[Tensor] = []

        def shared(members: list[_Cast] = members, found: list[Tensor] = found) -> Tensor:
            if not found:
                found.append(torch.stack([cast.own_scale() for cast in members]).amax(0))
            return found[0]

        for cast in members:
            cast.scale = shared if len(members) > 1 else None


def _add_notes(found: Rewriting) -> None:
    target, layout = found.target, found.source.layout
    again = sum(how == AGAIN for how in found.how.values())
    if again:
        found.notes.append(
            f"{again} weights are dequantised and cast again, so their values are rounded twice; a "
            "checkpoint in high precision gives better ones"
        )
    if isinstance(target, Layout):
        shapes = {
            key.removesuffix(WEIGHT): found.specs[key].shape
            for key, how in found.how.items()
            if how != COPIED
        }
        if (reason := transformers_refuses(target, shapes)) is not None:
            found.notes.append(f"not read by {TRANSFORMERS}: {reason}")
    has_scales = layout is not None and layout.static_inputs
    if has_scales and not (isinstance(target, Layout) and target.static_inputs):
        found.notes.append("the static scales of inputs are left out")
    if isinstance(target, Layout) and not found.source.layers:
        layers = sum(how == CAST for how in found.how.values())
        kept = [
            key
            for key, spec in found.specs.items()
            if found.how.get(key) == COPIED and len(spec.shape) > 1
        ]
        if not layers:
            found.notes.append("no weight becomes float8: all names are skipped")
        if kept:
            shown = ", ".join(kept[:8]) + (f", ... ({len(kept)} in all)" if len(kept) > 8 else "")
            found.notes.append(f"left in high precision: {shown}")


def _files(
    folder: Path, configs: dict[str, dict[str, Any]], dtype: torch.dtype | None
) -> dict[str, str | bytes]:
    """The files beside the tensors: those of the source, and its configs with what has changed."""
    found: dict[str, str | bytes] = {}
    for file in sorted(folder.iterdir()):
        is_weights = file.name.endswith((SUFFIX, INDEX_SUFFIX, *PICKLES))
        if file.is_file() and not is_weights and file.name not in _CONFIGS:
            found[file.name] = file.read_bytes()
    path = folder / _CONFIGS[0]
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config.pop("quantization_config", None)
    if dtype is not None:
        for field_ in {"dtype", "torch_dtype"} & config.keys():
            config[field_] = str(dtype).removeprefix("torch.")
    configs = configs | {path.name: config | configs.get(path.name, {})}
    found |= {name: json.dumps(c, indent=2) + "\n" for name, c in configs.items() if c}
    return found
