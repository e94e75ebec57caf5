"""What each parameter and buffer of a model becomes in a float8 checkpoint.

`planned` lists them in the order of the model, without reading data: `Item.specs` has the keys,
dtypes and shapes; `Item.gather` and `Item.cast` make the tensors of one parameter. A sharded
parameter is gathered then, alone, on all ranks together. Names, and the place of each tensor inside
a parameter, are those of ``names.py``; ``casts.py`` says with which bits weights are cast.

A layer that is in float8 in the model is so in the file. All else stays as it is: embeddings,
norms, biases, routers, and layers that were not converted. So does a layer whose weight another
module reads in high precision, as an embedding that is tied to the head; whose config multiplies
the weight in high precision; or whose weight files do not have as a matrix ``NAME.weight``.

The static scale of a layer's input, for layouts that store one, is what the user gives by the
layer's name; the constant of a static cast; or the scale in use of a delayed one, but for
``smooth_input=True``, where it is that of the input times factors that a file has no place for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8 import kernels
from float8.arguments import check_bool, check_module, check_type, did_you_mean
from float8.checkpoints.casts import (
    CAST_ANEW,
    TENSORWISE,
    TRAINING_CAST,
    WeightCast,
    fused,
    largest,
    sharing,
    weight_cast,
)
from float8.checkpoints.files import (
    MAX_SHARD_BYTES,
    Spec,
    in_files,
    kind_of,
    kinds_of,
    specs_of,
)
from float8.checkpoints.layouts import (
    LAYOUTS,
    CompressedTensors,
    FineGrained,
    Layer,
    Layout,
    ModelOpt,
    Shapes,
    read_by,
    transformers_refuses,
)
from float8.checkpoints.names import Slot, inside_of, published
from float8.config import ScalingType
from float8.convert.conversion import own_config
from float8.formats import E4M3, ScaleFormat
from float8.granularity import WHOLE, Blockwise, Rowwise, block_name
from float8.linear.float8_weight import is_resident
from float8.linear.layer import Float8Linear
from float8.linear.registration import stacked_weights, stored_by

# Granularity of a recipe's weights -> the variant of compressed_tensors that stores such scales.
_VARIANTS = {
    "tensorwise": CompressedTensors(),
    "rowwise": CompressedTensors(Rowwise()),
    "128x128": CompressedTensors(Blockwise(128, 128)),
    "1x32": CompressedTensors(Blockwise(1, 32)),
}
Entry = tuple[str, Tensor]


@dataclass(frozen=True)
class Item:
    """What one parameter or buffer of a model becomes in a file.

    ``name`` is that in the model, and ``specs`` has the keys in the file. ``gather`` returns the
    whole parameter and what its casts need of others. Where parameters are sharded, all ranks call
    it, in the order of the items. ``cast`` takes what ``gather`` returned and yields the tensors
    one by one, in the order of ``specs``.
    """

    name: str
    specs: dict[str, Spec]
    source: Tensor
    gather: Callable[[], Any]
    cast: Callable[[Any], Iterator[Entry]]


@dataclass(frozen=True)
class SavePlan:
    """What a checkpoint will have. ``print(plan)`` shows it as a table.

    Layers whose names differ in numbers alone share a line of the table.

    Attributes:
        layout: how layers in float8 are stored.
        layers: the layers in float8, as files name them -> how their weights are cast.
        skipped: the linear layers that stay in high precision -> why.
        tensors: key -> dtype, shape and file of every tensor.
        files: file -> bytes of its tensors.
        quantization_config: what ``config.json`` says to readers.
        notes: which libraries read it, and what they do with it.
    """

    layout: Layout
    layers: dict[str, str]
    skipped: dict[str, str]
    tensors: dict[str, Spec]
    files: dict[str, int]
    quantization_config: dict[str, Any]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.files.values())

    def layer_of(self, key: str) -> str | None:
        """The layer in float8 to which a tensor belongs, or None."""
        suffixes = (".weight", *self.layout.suffixes)
        names = [key.removesuffix(suffix) for suffix in suffixes if key.endswith(suffix)]
        return next((name for name in names if name in self.layers), None)

    def __str__(self) -> str:
        from tabulate import tabulate

        lines: dict[tuple[str, ...], list[int]] = {}  # first, third and last column -> bytes
        sizes = {key: spec.nbytes for key, spec in self.tensors.items()}
        for name, how in self.layers.items():
            keys = [f"{name}{suffix}" for suffix in (".weight", *self.layout.suffixes)]
            shape = "x".join(map(str, self.tensors[keys[0]].shape))
            nbytes = sum(sizes.pop(key) for key in keys)
            lines.setdefault((kind_of(name), shape, how), []).append(nbytes)
        for key, nbytes in sizes.items():
            name = f"other tensors, {str(self.tensors[key].dtype).removeprefix('torch.')}"
            lines.setdefault((name, "", "as they are"), []).append(nbytes)
        rows = [
            (name, len(n), shape, f"{sum(n) / 1e6:,.2f}", how)
            for (name, shape, how), n in lines.items()
        ]
        headers = ("layers", "count", "weight", "MB", "float8 by")
        align = ("left", "right", "right", "right", "left")
        parts = [
            f"{self.layout!r}\n{len(self.layers)} layers in float8, {self.nbytes / 1e9:.3g} GB in "
            f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}",
            tabulate(rows, headers, "simple", disable_numparse=True, colalign=align),
        ]
        if self.skipped:
            kinds = [(kind_of(name), reason) for name, reason in self.skipped.items()]
            left = [(name, kinds.count((name, why)), why) for name, why in dict.fromkeys(kinds)]
            titles = ("in high precision", "count", "why")
            parts.append(tabulate(left, titles, "simple", maxcolwidths=[None, None, 60]))
        parts.append("\n".join(fill(note, 100) for note in self.notes))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class _Layer:
    """A layer in float8: where its weight lies, and what it is stored with."""

    name: str
    slot: Slot
    parameter: Tensor
    cast: WeightCast
    input_scale: Tensor | None


def planned(
    model: nn.Module,
    layout: Layout | str | None,
    input_scales: Mapping[str, float | Tensor] | None,
    recast: bool,
    max_shard_bytes: float = MAX_SHARD_BYTES,
) -> tuple[SavePlan, list[Item]]:
    """What a model becomes in a float8 checkpoint, and how; no data is read.

    The model is converted; it may be compiled, in wrappers, sharded, or on the meta device. For
    ``layout`` see `layout_for`. ``input_scales`` has the static scales of inputs by layer, for
    layouts that store them. ``recast`` casts float8 weights of another granularity again, which
    rounds twice. Raises ValueError if the model has no layer in float8, or some that the layout
    cannot store. The message names all of them, and the fix.
    """
    check_module(model, "float8.checkpoints")
    check_bool(recast, "recast")
    modules, places = _Modules(model), published(model)
    owners = {key: modules.owner_of(key, slot) for key, slot in places.items()}
    shapes = {
        key.removesuffix(".weight"): tuple(places[key].shape)
        for key, (module, _) in owners.items()
        if module is not None
    }
    layout = layout_for(model, layout, shapes)
    given, skipped = _checked(input_scales, layout), {}
    layers: dict[str, _Layer] = {}
    problems: dict[str, list[str]] = defaultdict(list)  # reason -> names
    known = {name for names in modules.names.values() for name in names}
    slots: dict[str, dict[str, Slot]] = defaultdict(dict)
    for key, slot in places.items():
        slots[slot.parameter][key] = slot
        name, (module, reason) = key.removesuffix(".weight"), owners[key]
        if reason is not None:
            skipped[name] = reason
        if module is None:
            continue
        known.add(name)
        own = next((given[n] for n in (name, *modules.names[id(module)]) if n in given), None)
        scale = _input_scale(module, own) if layout.static_inputs else None
        parameter = modules.tensors[slot.parameter]
        weight = slot.of(parameter) if slot.index and is_resident(parameter) else parameter
        cast = weight_cast(module, weight, layout, scale, recast)
        refused = layout.refuses(layout.without_data(name, slot.shape, scale))
        if isinstance(cast, str) or refused:
            problems[refused or str(cast)].append(name)
        else:
            layers[name] = _Layer(name, slot, parameter, cast, scale)
    skipped |= modules.unpublished({*layers, *skipped})
    for name in given.keys() - known - skipped.keys():
        problems["there is no layer of this name, which input_scales has"].append(name)
    if problems or not layers:
        told = [f"{kinds_of(names)}: {reason}" for reason, names in problems.items()]
        none = "it has no layer in float8: convert_to_float8_training converts it"
        raise ValueError("this model cannot be stored:\n  " + "\n  ".join(told or [none]))
    items = [_item(name, modules.tensors[name], its, layers, layout) for name, its in slots.items()]
    specs = {key: spec for item in items for key, spec in item.specs.items()}
    tensors = in_files(specs, max_shard_bytes)
    files: dict[str, int] = defaultdict(int)
    for spec in tensors.values():
        files[spec.file] += spec.nbytes
    how = {name: _how(layers, layer, layout) for name, layer in layers.items()}
    config = layout.quantization_config(how, skipped)
    notes = [read_by(layout, shapes), *_notes(layout, layers)]
    return SavePlan(layout, how, skipped, tensors, dict(files), config, notes), items


def layout_for(
    model: nn.Module, layout: Layout | str | None, shapes: Shapes | None = None
) -> Layout:
    """The layout in which a converted model is stored.

    A `Layout` is returned as it is. A name stands for the variant that stores the scales of the
    model's recipe. None stands for the layout that stores those scales: ``fine_grained`` of 128x128
    blocks, ``compressed_tensors`` of rows, whole tensors and MX blocks. A model of Transformers
    with experts in MX blocks gets ``fine_grained``, which it reads. Inputs are static where all
    layers cast theirs with constants. ``shapes`` are those of the layers in float8.
    """
    if isinstance(layout, Layout):
        return layout
    such_as = f"a Layout, such as FineGrained(), or one of {', '.join(LAYOUTS)}"
    check_type(layout, (str, type(None)), "checkpoints", "layout", such_as)
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}, not {such_as}{did_you_mean(layout, LAYOUTS)}")
    plans = [c.plan for m in model.modules() if (c := own_config(m)) is not None]
    casts = [plan.output.b for plan in plans if plan.output.b is not None]
    names = sorted({block_name(cast.block) for cast in casts})
    variant = _VARIANTS.get(names[0]) if len(names) == 1 else None
    if layout is None and variant is None:
        raise ValueError(
            f"the model's weights have scales of several granularities or of one that no layout has"
            f": {', '.join(names)}; say how to store them by layout=, one of {', '.join(LAYOUTS)}"
            if names
            else "the model has no layer in float8: convert it first"
        )
    is_mx = layout is None and variant == _VARIANTS["1x32"]
    found: Layout = ModelOpt()
    if layout == "fine_grained" or (layout is None and names == ["128x128"]):
        # Engines then round the scales of inputs to powers of two, as the recipe does.
        powers = casts and all(c.scale_format is ScaleFormat.POWER_OF_TWO for c in casts)
        found = FineGrained(scale_format=ScaleFormat.POWER_OF_TWO) if powers else FineGrained()
    elif layout != "modelopt":
        inputs = [plan.output.a for plan in plans]
        is_static = bool(inputs) and all(
            cast is not None and cast.scaling_type is ScalingType.STATIC for cast in inputs
        )
        found = variant or _VARIANTS["tensorwise"]
        if found == _VARIANTS["tensorwise"]:
            found = CompressedTensors(static_inputs=is_static)
    if is_mx and transformers_config(model) is not None:
        instead = FineGrained((1, 32), ScaleFormat.E8M0)  # stores the same scales
        refused = [transformers_refuses(each, shapes or {}) for each in (found, instead)]
        found = instead if refused[0] and not refused[1] else found
    return found


# --- the modules of a model


class _Modules:
    """The modules of a model, perhaps in wrappers, by the tensors that they own.

    Attributes:
        tensors: name -> parameter or buffer, under each of its names.
        names: the modules' names in the model, by id, without those of wrappers; shared modules
            have several.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[int, list[str]] = defaultdict(list)
        self._modules: dict[str, tuple[nn.Module, str]] = {}
        # id of a tensor -> id of each module that has it -> (name of the module, module, own name)
        self._owners: dict[int, dict[int, tuple[str, nn.Module, str]]] = defaultdict(dict)
        self._reasons: dict[int, str] = {}  # why a conversion has left a module alone
        for name, plain, module in _walk(model, "", ""):
            self.names[id(module)].append(plain)
            prefix = f"{name}." if name else ""
            for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self.tensors[prefix + own] = tensor
                    self._modules[prefix + own] = module, own
                    self._owners[id(tensor)].setdefault(id(module), (plain, module, own))
        for module in model.modules():
            report = module.__dict__.get("float8_conversion")
            own_modules = dict(module.named_modules()) if report is not None else {}
            for name, reason in (report.skipped if report is not None else {}).items():
                self._reasons[id(own_modules.get(name))] = reason

    def owner_of(self, key: str, slot: Slot) -> tuple[nn.Module | None, str | None]:
        """The module that multiplies by a tensor in float8, or the reason why none does.

        Returns (module, None); (None, reason) for the weight of a linear layer in high precision;
        and (None, None) for all other tensors. ``key`` is the tensor's name in the file.
        """
        module, own = self._modules[slot.parameter]
        is_matrix = key.endswith(".weight") and len(slot.shape) == 2
        if not _multiplies_in_float8(module, own):
            if isinstance(module, nn.Embedding) or not is_matrix:
                return None, None
            kind = type(module).__name__.removeprefix("FSDP")  # which fully_shard adds
            return None, self._reasons.get(id(module), f"it is a {kind} that was not converted")
        for name, other, its in self._owners[id(self.tensors[slot.parameter])].values():
            if not _multiplies_in_float8(other, its):
                return None, (
                    f"its weight is also {name}.{its} ({type(other).__name__}), which "
                    "reads it in high precision"
                )
        config = own_config(module)
        assert config is not None
        if config.plan.output.b is None:
            return None, "its config multiplies the weight in high precision"
        if not is_matrix:
            return None, (
                f"files have its weight as {key} of shape {tuple(slot.shape)}, and float8 layouts "
                "store matrices called NAME.weight"
            )
        return module, None

    def unpublished(self, published: set[str]) -> dict[str, str]:
        """Name -> reason, of the linear layers that have no weight of their own in the file.

        ``published`` has the names of the layers that have one.
        """
        found = {}
        for owners in self._owners.values():
            for name, module, own in owners.values():
                others = [n for n, m, _ in owners.values() if m is not module]
                is_layer = isinstance(module, nn.Linear) and own == "weight"
                if is_layer and others and name not in published:
                    found[name] = f"its weight is that of {others[0]}"
        return found


def _multiplies_in_float8(module: nn.Module, name: str) -> bool:
    if isinstance(module, Float8Linear):
        return name == "weight"
    return own_config(module) is not None and name in stacked_weights(module)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers, as those of DistributedDataParallel and torch.compile."""
    while (inside := inside_of(model)) is not None:
        model = model.get_submodule(inside)
    return model


def transformers_config(model: nn.Module) -> Any:
    """The config of a model of Transformers, perhaps in wrappers; None of others."""
    config = getattr(unwrapped(model), "config", None)
    return config if hasattr(config, "to_json_string") else None


def _walk(module: nn.Module, name: str, plain: str) -> Iterator[tuple[str, str, nn.Module]]:
    """(name, name without those of wrappers, module) of all modules, shared ones several times."""
    inside = inside_of(module)
    if inside is None:  # a wrapper shares its name with what it wraps
        yield name, plain, module
    for own, child in module._modules.items():
        if child is not None:
            further = plain if own == inside else f"{plain}.{own}".removeprefix(".")
            yield from _walk(child, f"{name}.{own}".removeprefix("."), further)


# --- the scales of inputs


def _checked(scales: Any, layout: Layout) -> dict[str, float]:
    """The scales that a user gives, by layer."""
    such_as = 'a mapping of layers to scales, as {"layers.0.proj": 0.02}'
    check_type(scales, (Mapping, type(None)), "input_scales", "input_scales", such_as)
    found = {}
    for name, scale in (scales or {}).items():
        check_type(scale, (int, float, Tensor), "input_scales", str(name), "a number")
        found[name] = (
            float(scale) if not isinstance(scale, Tensor) else scale.double().mean().item()
        )
        if getattr(scale, "numel", lambda: 1)() != 1 or not 0 < found[name] < math.inf:
            raise ValueError(f"input_scales: {name}: it is one number, finite and > 0, got {scale}")
    if found and not layout.static_inputs:
        raise ValueError(
            f"input_scales are for layouts that store them, and {layout!r} has dynamic inputs; "
            "leave them out, or take CompressedTensors(static_inputs=True) or ModelOpt()"
        )
    return found


def _input_scale(module: nn.Module, given: float | None) -> Tensor | None:
    """The static scale of a layer's input, float32 of shape (); None if there is none."""
    plan = module.config.plan if isinstance(module, Float8Linear) else None
    cast = None if plan is None or plan.smooth_input else plan.output.a
    if given is None and cast is not None and cast.format == E4M3 and set(cast.block) == {WHOLE}:
        given = None if cast.static_scale is None else float(cast.static_scale)
        state: Any = module.casts[0].state  # type: ignore[union-attr, index]
        if given is None and state is not None and (state.ready or state.scale.is_meta):
            found: Tensor = state.scale.detach()
            return found
    return None if given is None else torch.tensor(given, dtype=torch.float32)


# --- items


def _item(
    name: str, tensor: Tensor, slots: dict[str, Slot], layers: dict[str, _Layer], layout: Layout
) -> Item:
    own = {key: layers.get(key.removesuffix(".weight")) for key in slots if key.endswith(".weight")}
    casts = {each.name: each.cast for each in layers.values()}
    specs: dict[str, Spec] = {}
    groups: dict[str, list[_Layer]] = {}
    for key, slot in slots.items():
        if (layer := own.get(key)) is None:
            specs[key] = Spec(tensor.dtype, tuple(slot.shape))
            continue
        empty = layout.without_data(layer.name, slot.shape, layer.input_scale)
        specs |= specs_of(layout.tensors(empty))
        if group := sharing(layer.name, casts, layout):
            groups[key] = [layers[each] for each in group]

    @torch.no_grad()
    def gather() -> tuple[Tensor, dict[str, Tensor]]:
        whole = _whole(_plain(tensor))
        scales = {
            key: largest(each.cast.scale(partial(_amax, each, name, whole)) for each in group)
            for key, group in groups.items()
        }
        return whole, scales

    @torch.no_grad()
    def cast(gathered: tuple[Tensor, dict[str, Tensor]]) -> Iterator[Entry]:
        whole, scales = gathered
        for key, slot in slots.items():
            part = slot.of(whole) if slot.index or slot.transposed else whole
            if (layer := own.get(key)) is None:
                yield key, part.dequantize() if is_resident(part) else part
                continue
            weight = layer.cast.of(part, scales.get(key))
            yield from layout.tensors(Layer(layer.name, weight, layer.input_scale)).items()

    return Item(name, specs, tensor, gather, cast)


def _amax(layer: _Layer, name: str, whole: Tensor) -> Tensor:
    """The largest magnitude of a layer's weight, float32 (1, 1).

    ``whole`` is the parameter called ``name``, which is gathered already.
    """
    plain: Any = whole if layer.slot.parameter == name else _plain(layer.parameter)
    if not kernels.is_sharded(plain) or layer.slot.index:
        return kernels.amax(layer.slot.of(_whole(plain)), TENSORWISE)
    found = kernels.amax(plain.to_local(), TENSORWISE)
    for group in plain.device_mesh.get_all_groups():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


def _how(layers: Mapping[str, _Layer], layer: _Layer, layout: Layout) -> str:
    """How a layer's weight is cast, in words."""
    together = [layers[name] for name in fused(layer.name, layers, layout)]
    others = ", ".join(each.name.rpartition(".")[2] for each in together if each is not layer)
    how = layer.cast.how
    if others and layer.cast.operand is None:
        return f"{how}; engines that fuse it with {others} cast it again"
    if how == TRAINING_CAST and not _has_bits_of_training(layer, together):
        how = CAST_ANEW
    return f"{how}, one scale with {others}" if others else how


def _has_bits_of_training(layer: _Layer, together: list[_Layer]) -> bool:
    """Whether a cast of a layer gives what training casts: whole blocks, all with their scales."""
    if together:  # a scale for all: that of training, where they are one parameter
        return all(each.slot.parameter == layer.slot.parameter for each in together)
    assert layer.cast.operand is not None
    slot, shape, block = layer.slot, layer.parameter.shape, layer.cast.operand.block
    index: Any = [*slot.index, *[slice(None)] * (len(shape) - len(slot.index))]
    extents = reversed(block) if slot.transposed else block
    for cut, size, extent in zip(index[-2:], shape[-2:], extents, strict=True):
        start, stop, step = cut.indices(size)
        is_whole = (start, stop, step) == (0, size, 1) or extent == 1
        splits = extent == WHOLE or step != 1 or start % extent or (stop % extent and stop != size)
        if splits and not is_whole:
            return False
    return True


def _notes(layout: Layout, layers: Mapping[str, _Layer]) -> Iterator[str]:
    """What engines do with scales of blocks that are no powers of two."""
    if layout.scale_format is not ScaleFormat.FLOAT32 or layout.granularity != Blockwise(128, 128):
        return
    if not all(layer.cast.has_powers_of_two(layer.parameter) for layer in layers.values()):
        yield (
            "not all scales are powers of two: on Blackwell, engines that multiply by UE8M0 scales "
            "cast such weights again, or misread them (SGLang before June 2026; by its source); "
            "take FineGrained(scale_format=ScaleFormat.POWER_OF_TWO)"
        )


def _plain(tensor: Tensor) -> Tensor:
    """A parameter or buffer, or a DTensor of plain ones, without its autograd history."""
    rule = stored_by(tensor)
    return (tensor if rule is None else rule.to_plain(tensor)).detach()


def _whole(plain: Tensor) -> Tensor:
    """The whole of a tensor; all ranks call it, if it is sharded."""
    return plain.full_tensor() if kernels.is_sharded(plain) else plain  # type: ignore[attr-defined]


# --- values that cannot be saved


@torch.no_grad()
def refuses_values(items: Iterable[Item]) -> str | None:
    """The reason why the values of parameters cannot be saved, or None; all are read once.

    Of a sharded parameter this rank's part is looked at. Buffers may hold infinities, as masks do.
    """
    empty = [item.name for item in items if item.source.is_meta]
    if empty:
        return f"nothing was written: {kinds_of(empty)} on the meta device: load the weights first"
    bad = [
        item.name
        for item in items
        if isinstance(item.source, nn.Parameter)
        and item.source.is_floating_point()
        and not _is_finite(item.source)
    ]
    if bad:
        return (
            f"nothing was written: {kinds_of(bad)} with NaN or inf (float8.find_nan(model) finds "
            "where a step makes them)"
        )
    return None


def _is_finite(source: Tensor) -> bool:
    plain: Any = _plain(source)
    local = plain.to_local() if kernels.is_sharded(plain) else plain
    parts = (local.float8_data.float(), local.scale.float()) if is_resident(local) else (local,)
    # Not isfinite(), which would need memory for each element.
    return all(bool(torch.stack(torch.aminmax(x)).isfinite().all()) for x in parts if x.numel())
