"""What each parameter and buffer of a model becomes in a float8 checkpoint.

`items` lists them in the order of the model, without reading data: `Item.specs` has the keys,
dtypes and shapes, and `Item.read` makes the tensors of one parameter. A sharded parameter is
gathered then, alone, on all ranks together.

Names, and the place of each tensor inside a parameter, are those of ``stacks.py``. A layer that is
in float8 here is in float8 in the file (``weight_cast.py`` says with which bits); all else stays as
it is: embeddings, norms, biases, routers, and layers that were not converted. So does a layer whose
weight another module reads in high precision, as an embedding that is tied to the head.

**Scales that layers share.** Engines fuse the projections that read the same input, and a fused
weight with one scale per tensor has one scale. If the parts had their own, the engine would
dequantise them and cast again with the largest. So a layout with one scale per tensor casts the
parts of `FUSED` with their largest scale, once, from high precision. Resident weights keep theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8 import kernels
from float8.arguments import check_bool, check_module
from float8.checkpoints.float8_layers import ModelLayers, transformers_config
from float8.checkpoints.input_scale import FIX, check_input_scales, input_scale
from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.model_layout import layout_for
from float8.checkpoints.readers import read_by, transformers_refuses
from float8.checkpoints.shards import DTYPE_NAMES, Spec, kinds_of
from float8.checkpoints.stacks import Slot, published
from float8.checkpoints.weight_cast import (
    CAST_ANEW,
    TENSORWISE,
    TRAINING_CAST,
    WeightCast,
    weight_cast,
)
from float8.formats import ScaleFormat
from float8.granularity import WHOLE, Blockwise
from float8.linear.float8_weight import is_resident
from float8.linear.registration import stored_by

# The last parts of the names of projections that engines fuse.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
Entry = tuple[str, Tensor]


def fused_with(name: str) -> tuple[str, ...]:
    """The names of the layers that engines fuse with one, itself among them; or none."""
    parent, dot, last = name.rpartition(".")
    return next((tuple(f"{parent}{dot}{n}" for n in names) for names in FUSED if last in names), ())


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

    def read(self) -> dict[str, Tensor]:
        """The tensors of this item, by key; all ranks call it where parameters are sharded."""
        return dict(self.cast(self.gather()))


@dataclass
class Checkpoint:
    """The float8 checkpoint of a model, before any data is read.

    Attributes:
        layout: how its layers are stored.
        items: what each parameter and buffer becomes.
        layers: the names of the layers in float8, as files have them -> how each is cast.
        skipped: the names of the linear layers that stay in high precision -> why.
        notes: which libraries read it, and what they do with it.
        misread: how Transformers misreads the layers of its own model, or None.
    """

    layout: Layout
    items: list[Item] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    misread: str | None = None

    @property
    def specs(self) -> dict[str, Spec]:
        """Key -> dtype and shape of all tensors, in the order of the items."""
        return {key: spec for item in self.items for key, spec in item.specs.items()}

    @property
    def config(self) -> dict[str, Any]:
        """The ``quantization_config`` of the checkpoint."""
        return self.layout.quantization_config(self.layers, self.skipped)


@dataclass(frozen=True)
class _Layer:
    """A layer in float8: where its weight lies, and what it is stored with."""

    name: str
    slot: Slot
    parameter: Tensor
    cast: WeightCast
    input_scale: Tensor | None

    def amax(self, wholes: Mapping[str, Tensor]) -> Tensor:
        """The largest magnitude of the whole weight, float32 (1, 1).

        ``wholes`` has the parameters that are gathered already, by name.
        """
        if (whole := wholes.get(self.slot.parameter)) is not None:
            return kernels.amax(self.slot.of(whole), TENSORWISE)
        plain: Any = _plain(self.parameter)
        if not kernels.is_sharded(plain):
            return kernels.amax(self.slot.of(plain), TENSORWISE)
        if self.slot.index:
            return kernels.amax(self.slot.of(_whole(plain)), TENSORWISE)
        mesh = plain.device_mesh
        found = kernels.amax(plain.to_local(), TENSORWISE)
        for dim in range(mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        return found


def items(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    input_scales: Mapping[str, float | Tensor] | None = None,
    recast: bool = False,
) -> Checkpoint:
    """What a model becomes in a float8 checkpoint; no data is read.

    The model is converted; it may be compiled, in wrappers, sharded, or on the meta device. For
    ``layout`` see `layout_for`. ``input_scales`` has the static scales of inputs by layer, for
    layouts that store them. ``recast`` casts float8 weights of another granularity again, which
    rounds twice. Raises ValueError if the model has no layer in float8, or some that the layout
    cannot store. The message names all of them, and the fix.
    """
    check_module(model, "float8.checkpoints")
    check_bool(recast, "recast")
    model_layers, places = ModelLayers(model), published(model)
    in_float8 = {key: model_layers.layer_of(key, slot) for key, slot in places.items()}
    shapes = {
        key.removesuffix(".weight"): tuple(places[key].shape)
        for key, (module, _) in in_float8.items()
        if module is not None
    }
    found = Checkpoint(layout_for(model, layout, shapes))
    given = check_input_scales(input_scales)
    if given and not found.layout.static_inputs:
        raise ValueError(
            f"input_scales are for layouts that store them, and {found.layout} has dynamic inputs; "
            "leave them out, or take CompressedTensors(static_inputs=True) or ModelOpt()"
        )
    layers: dict[str, _Layer] = {}
    problems: list[str] = []
    used: set[str] = set()
    slots: dict[str, dict[str, Slot]] = defaultdict(dict)
    for key, slot in places.items():
        slots[slot.parameter][key] = slot
        name = key.removesuffix(".weight")
        module, reason = in_float8[key]
        if reason is not None:
            found.skipped[name] = reason
        if module is None:
            continue
        names = [n for n in (name, *model_layers.names[id(module)]) if n in given]
        used |= set(names)
        scale = input_scale(module, given[names[0]] if names else None)
        parameter = model_layers.tensors[slot.parameter]
        made = _layer(module, name, slot, parameter, scale, found.layout, recast)
        if isinstance(made, str):
            problems.append(f"{name}: {made}")
        else:
            layers[key] = made
    found.layers = {layer.name: _how(layers, layer, found.layout) for layer in layers.values()}
    found.skipped |= model_layers.unpublished({*found.layers, *found.skipped})
    known = {name for names in model_layers.names.values() for name in names}
    for name in given.keys() - known - found.skipped.keys() - used:
        problems.append(f"input_scales has a scale for {name}: there is no layer of this name")
    if not (found.layers or problems):
        problems.append("it has no layer in float8: convert_to_float8_training converts it")
    for parameter_name, its in slots.items():
        tensor = model_layers.tensors[parameter_name]
        if tensor.dtype not in DTYPE_NAMES:
            problems.append(f"{parameter_name}: no safetensors file has {tensor.dtype}")
            continue
        found.items.append(_item(parameter_name, tensor, its, layers, found.layout))
    found.notes = [read_by(found.layout, shapes), *_notes(found.layout, layers)]
    if found.layout.name == "fine_grained" and transformers_config(model) is not None:
        found.misread = transformers_refuses(found.layout, shapes)
    if problems:
        raise ValueError("this model cannot be stored:\n  " + "\n  ".join(by_reason(problems)))
    return found


def by_reason(problems: Iterable[str]) -> list[str]:
    """The problems ``"name: reason"``, each reason once.

    Names that differ in numbers alone become one pattern, with its count.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        name, colon, reason = problem.partition(": ")
        assert colon, problem
        groups[reason].append(name)
    return [f"{kinds_of(names)}: {reason}" for reason, names in groups.items()]


def _layer(
    module: nn.Module,
    name: str,
    slot: Slot,
    parameter: Tensor,
    scale: Tensor | None,
    layout: Layout,
    recast: bool,
) -> _Layer | str:
    """A layer in float8, or the reason why the layout cannot store it."""
    if layout.static_inputs and scale is None:
        return FIX
    scale = scale if layout.static_inputs else None
    without_data = layout.layer_without_data(name, slot.shape, scale)
    weight = slot.of(parameter) if slot.index and is_resident(parameter) else parameter
    cast = weight_cast(module, without_data, weight, layout, recast)
    if isinstance(cast, str):
        return cast
    return layout.refuses(without_data) or _Layer(name, slot, parameter, cast, scale)


# --- items


def _item(
    name: str, tensor: Tensor, slots: dict[str, Slot], layers: dict[str, _Layer], layout: Layout
) -> Item:
    specs: dict[str, Spec] = {}
    for key, slot in slots.items():
        if (layer := layers.get(key)) is None:
            specs[key] = Spec(tensor.dtype, tuple(slot.shape))
            continue
        without_data = layout.layer_without_data(layer.name, slot.shape, layer.input_scale)
        for own, x in layout.tensors(without_data).items():
            specs[own] = Spec(x.dtype, tuple(x.shape))
    groups = {key: _group(layers, layers[key], layout) for key in slots if key in layers}

    @torch.no_grad()
    def gather() -> tuple[Tensor, dict[str, Tensor]]:
        whole = _whole(_plain(tensor))
        scales = {key: _shared(group, {name: whole}) for key, group in groups.items() if group}
        return whole, scales

    @torch.no_grad()
    def cast(gathered: tuple[Tensor, dict[str, Tensor]]) -> Iterator[Entry]:
        whole, scales = gathered
        for key, slot in slots.items():
            part = slot.of(whole) if slot.index or slot.transposed else whole
            if (layer := layers.get(key)) is None:
                yield key, part.dequantize() if is_resident(part) else part
                continue
            weight = layer.cast.of(part, scales.get(key))
            yield from layout.tensors(Layer(layer.name, weight, layer.input_scale)).items()

    return Item(name, specs, tensor, gather, cast)


def _fused(layers: Mapping[str, _Layer], layer: _Layer, layout: Layout) -> list[_Layer]:
    """The layers that engines fuse to one scale with this one, itself among them, or none."""
    if layout.granularity.block_of((0, 0)) != TENSORWISE:
        return []
    keys = [f"{name}.weight" for name in fused_with(layer.name)]
    found = [layers[key] for key in keys if key in layers]
    return found if len(found) > 1 else []


def _group(layers: Mapping[str, _Layer], layer: _Layer, layout: Layout) -> list[_Layer]:
    """The layers that share the scale of one, itself among them; empty if it has its own."""
    found = [each for each in _fused(layers, layer, layout) if each.cast.operand is not None]
    return found if layer in found and len(found) > 1 else []


def _how(layers: Mapping[str, _Layer], layer: _Layer, layout: Layout) -> str:
    """How a layer's weight is cast, in words."""
    fused = _fused(layers, layer, layout)
    others = ", ".join(each.name.rpartition(".")[2] for each in fused if each is not layer)
    if others and layer.cast.operand is None:
        return f"{layer.cast.how}; engines that fuse it with {others} cast it again"
    how = layer.cast.how
    if how == TRAINING_CAST and not _has_bits_of_training(layer, fused):
        how = CAST_ANEW
    return f"{how}, one scale with {others}" if others else how


def _has_bits_of_training(layer: _Layer, fused: list[_Layer]) -> bool:
    """Whether a cast of a layer gives what training casts: whole blocks, all with their scales."""
    if fused:  # a scale for all: that of training, where they are one parameter
        return all(each.slot.parameter == layer.slot.parameter for each in fused)
    assert layer.cast.operand is not None
    slot, shape = layer.slot, layer.parameter.shape
    index: Any = [*slot.index, *[slice(None)] * (len(shape) - len(slot.index))]
    block = layer.cast.operand.block
    for cut, size, extent in zip(
        index[-2:], shape[-2:], reversed(block) if slot.transposed else block, strict=True
    ):
        start, stop, step = cut.indices(size)
        if (start, stop, step) == (0, size, 1) or extent == 1:
            continue
        if extent == WHOLE or step != 1 or start % extent or (stop % extent and stop != size):
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


def _shared(group: list[_Layer], wholes: Mapping[str, Tensor]) -> Tensor:
    """The largest of the scales of layers, (1, 1)."""
    scales = [layer.cast.scale(partial(layer.amax, wholes)) for layer in group]
    return torch.stack([scale.to(scales[0].device) for scale in scales]).amax(0)


def _plain(tensor: Tensor) -> Tensor:
    """A parameter or buffer, or a DTensor of plain ones, without its autograd history."""
    rule = stored_by(tensor)
    return (tensor if rule is None else rule.to_plain(tensor)).detach()


def _whole(plain: Tensor) -> Tensor:
    """The whole of a tensor; all ranks call it, if it is sharded."""
    return plain.full_tensor() if kernels.is_sharded(plain) else plain  # type: ignore[attr-defined]
