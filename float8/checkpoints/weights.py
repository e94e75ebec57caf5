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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8 import kernels
from float8.arguments import check_bool, check_module
from float8.checkpoints.casts import CAST_ANEW, STORED, TRAINING_CAST, StoredLayer, stored_layer
from float8.checkpoints.files import MAX_SHARD_BYTES, Spec, kinds_of
from float8.checkpoints.layouts import (
    BLOCKS,
    LAYOUTS,
    MX,
    SCHEMES,
    CompressedTensors,
    FineGrained,
    Layout,
    ModelOpt,
    Shapes,
    transformers_refuses,
)
from float8.checkpoints.names import Slot, inside_of, published, tensor_of, walk
from float8.checkpoints.plan import SavePlan, plan_of
from float8.config import ScalingType
from float8.convert.conversion import own_config
from float8.convert.folding import folded
from float8.formats import E4M3, ScaleFormat
from float8.granularity import WHOLE, Tensorwise, block_name
from float8.linear.float8_weight import is_resident
from float8.linear.layer import Float8Linear
from float8.linear.registration import stacked_weights, stored_by


@dataclass(frozen=True)
class Item:
    """What one parameter or buffer of a model becomes in a file.

    ``name`` is that in the model, and ``specs`` has the keys in the file. A call of ``read``
    gathers the whole parameter, and what its casts need of others; where parameters are sharded,
    all ranks call it, in the order of the items. It returns an iterator, which casts the tensors
    one by one, in the order of ``specs``.
    """

    name: str
    source: Tensor
    specs: dict[str, Spec]
    read: Callable[[], Iterator[tuple[str, Tensor]]]


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
    places = published(model)
    in_float8, skipped, names = _found(model, places)
    shapes = {name: tuple(places[f"{name}.weight"].shape) for name in in_float8}
    layout = layout_for(model, layout, shapes)
    given = {name: float(scale) for name, scale in (input_scales or {}).items()}
    layers: dict[str, StoredLayer] = {}
    problems: list[tuple[str, str]] = []  # name and reason
    for name, module in in_float8.items():
        own = next((given[n] for n in (name, *names[id(module)]) if n in given), None)
        scale = _input_scale(module, own) if layout.static_inputs else None
        slot = places[f"{name}.weight"]
        weight = tensor_of(model, slot)
        weight = slot.of(weight) if slot.index and is_resident(weight) else weight
        stored = stored_layer(name, shapes[name], weight, layout, scale, module, recast)
        if isinstance(stored, str):
            problems.append((name, stored))
        else:
            layers[name] = stored
    known = {*in_float8, *skipped, *(name for its in names.values() for name in its)}
    problems += _unfit_scales(given, known, layout)
    if problems or not layers:
        none = "it has no layer in float8: convert_to_float8_training converts it"
        told = "\n  ".join(folded(problems) or [none])
        raise ValueError(f"this model cannot be stored:\n  {told}")
    slots: dict[str, dict[str, Slot]] = defaultdict(dict)
    for key, slot in places.items():
        slots[slot.parameter][key] = slot
    amax = partial(_amax, model, places)
    items = [_item(model, its, layers, amax) for its in slots.values()]
    specs = {key: spec for item in items for key, spec in item.specs.items()}
    how = {name: _how(layer, layers, model, places) for name, layer in layers.items()}
    return plan_of(layout, layers, how, skipped, specs, max_shard_bytes), items


def _unfit_scales(
    given: Mapping[str, float], known: set[str], layout: Layout
) -> Iterator[tuple[str, str]]:
    """Name and reason, of input scales that a user gives and that cannot be stored."""
    for name, scale in given.items():
        if name not in known:
            yield name, "there is no layer of this name, which input_scales has"
        elif not layout.static_inputs:
            yield name, f"it has an input scale, and {layout!r} has dynamic inputs"
        elif not 0 < scale < math.inf:
            yield name, f"its input scale is {scale}; a scale is finite and > 0"


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
    plans = [c.plan for m in model.modules() if (c := own_config(m)) is not None]
    casts = [plan.output.b for plan in plans if plan.output.b is not None]
    powers = {cast.scale_format for cast in casts} == {ScaleFormat.POWER_OF_TWO}
    # Engines then round the scales of inputs to powers of two, as the recipe does.
    fine = FineGrained(scale_format=ScaleFormat.POWER_OF_TWO if powers else ScaleFormat.FLOAT32)
    inputs = {None if (a := plan.output.a) is None else a.scaling_type for plan in plans}
    blocks = {cast.block for cast in casts}
    by = next((each for each in SCHEMES if {each.block_of((0, 0))} == blocks), None)
    is_static = by in (None, Tensorwise()) and inputs == {ScalingType.STATIC}
    own = CompressedTensors(by or Tensorwise(), is_static)
    choices: dict[str | None, Layout | None] = {
        "fine_grained": fine,
        "compressed_tensors": own,
        "modelopt": ModelOpt(),
        None: fine if by == BLOCKS else own if by is not None else None,
    }
    found = next((each for name, each in choices.items() if name == layout), None)
    if found is None:
        has = ", ".join(sorted(map(block_name, blocks))) or "no layer in float8: convert it"
        raise ValueError(
            f"layout must be a Layout, such as FineGrained(), or one of {', '.join(LAYOUTS)}; got "
            f"{layout!r}, and the model has {has}"
        )
    if layout is None and by == MX and transformers_config(model) is not None:
        instead = FineGrained((1, 32), ScaleFormat.E8M0)  # stores the same scales
        refused = [transformers_refuses(each, shapes or {}) for each in (found, instead)]
        found = instead if refused[0] and not refused[1] else found
    return found


# --- the modules of a model


def _found(
    model: nn.Module, places: Mapping[str, Slot]
) -> tuple[dict[str, nn.Module], dict[str, str], dict[int, list[str]]]:
    """The layers of a model, perhaps in wrappers, by their names in files.

    Returns those that multiply in float8, the linear ones that stay in high precision with the
    reason, and the names in the model of all modules, by id, without those of wrappers.
    """
    names: dict[int, list[str]] = defaultdict(list)  # shared modules have several
    reasons: dict[int, str] = {}  # why a conversion has left a module alone
    # id of a tensor -> id of each module that has it -> (name of the module, module, own name)
    owners: dict[int, dict[int, tuple[str, nn.Module, str]]] = defaultdict(dict)
    for _, plain, module in walk(model):
        names[id(module)].append(plain)
        for own, tensor in (module._parameters | module._buffers).items():
            owners[id(tensor)].setdefault(id(module), (plain, module, own))
        if (report := module.__dict__.get("float8_conversion")) is not None:
            inside = dict(module.named_modules())
            reasons |= {id(inside.get(name)): why for name, why in report.skipped.items()}
    in_float8: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for key, slot in places.items():
        parent, _, own = slot.parameter.rpartition(".")
        module, name = model.get_submodule(parent), key.removesuffix(".weight")
        is_matrix = key.endswith(".weight") and len(slot.shape) == 2
        if _multiplies_in_float8(module, own):
            why = [
                f"its weight is also {its}.{n} ({type(other).__name__}), which reads it in high "
                "precision"
                for its, other, n in owners[id(tensor_of(model, slot))].values()
                if not _multiplies_in_float8(other, n)
            ]
            if own_config(module).plan.output.b is None:  # type: ignore[union-attr]
                why.append("its config multiplies the weight in high precision")
            if not is_matrix:
                why.append(
                    f"files have its weight as {key} of shape {tuple(slot.shape)}, and float8 "
                    "layouts store matrices called NAME.weight"
                )
            skipped |= {name: why[0]} if why else {}
            in_float8 |= {} if why else {name: module}
        elif is_matrix and not isinstance(module, nn.Embedding):
            kind = type(module).__name__.removeprefix("FSDP")  # which fully_shard adds
            skipped[name] = reasons.get(id(module), f"it is a {kind} that was not converted")
    for readers in owners.values():  # linear layers that have no weight of their own in the file
        for name, module, own in readers.values() if len(readers) > 1 else ():
            if isinstance(module, nn.Linear) and own == "weight" and name not in in_float8:
                other = next(n for n, m, _ in readers.values() if m is not module)
                skipped.setdefault(name, f"its weight is that of {other}")
    return in_float8, skipped, names


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


# --- the tensors of a parameter


def _item(
    model: nn.Module,
    slots: dict[str, Slot],
    layers: Mapping[str, StoredLayer],
    amax: Callable[[str, Tensor, StoredLayer], Tensor],
) -> Item:
    first = next(iter(slots.values()))
    name, tensor = first.parameter, tensor_of(model, first)
    named = {key: key.removesuffix(".weight") for key in slots if key.endswith(".weight")}
    own = {key: layers[layer] for key, layer in named.items() if layer in layers}
    specs: dict[str, Spec] = {}
    for key, slot in slots.items():
        plain = {key: Spec(tensor.dtype, tuple(slot.shape))}
        specs |= own[key].specs if key in own else plain

    @torch.no_grad()
    def read() -> Iterator[tuple[str, Tensor]]:
        whole = _whole(_plain(tensor))
        largest = partial(amax, name, whole)
        scales = {key: layer.shared_scale(layers, largest) for key, layer in own.items()}
        return cast(whole, scales)

    @torch.no_grad()
    def cast(whole: Tensor, scales: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        for key, slot in slots.items():
            part = slot.of(whole) if slot.index or slot.transposed else whole
            if key in own:
                yield from own[key].tensors(part, scales[key]).items()
            else:
                yield key, part.dequantize() if is_resident(part) else part

    return Item(name, tensor, specs, read)


def _amax(
    model: nn.Module, places: Mapping[str, Slot], gathered: str, whole: Tensor, layer: StoredLayer
) -> Tensor:
    """The largest magnitude of a layer's weight, float32 (1, 1).

    ``whole`` is the parameter called ``gathered``, which is gathered already.
    """
    slot = places[f"{layer.name}.weight"]
    plain: Any = whole if slot.parameter == gathered else _plain(tensor_of(model, slot))
    if not kernels.is_sharded(plain) or slot.index:
        return kernels.amax(slot.of(_whole(plain)), (WHOLE, WHOLE))
    found = kernels.amax(plain.to_local(), (WHOLE, WHOLE))
    for group in plain.device_mesh.get_all_groups():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


def _how(
    layer: StoredLayer,
    layers: Mapping[str, StoredLayer],
    model: nn.Module,
    places: Mapping[str, Slot],
) -> str:
    """How a layer's weight is cast, in words.

    It is the cast of training where whole blocks are cast, and all with their own scales, or with
    that of one parameter which has all layers that share a scale.
    """
    together, how = layer.fused_with(layers), layer.how
    others = ", ".join(each.name.rpartition(".")[2] for each in together if each is not layer)
    if others and how == STORED:
        return f"{how}; engines that fuse it with {others} cast it again"
    slot = places[f"{layer.name}.weight"]
    if together:
        splits = len({places[f"{each.name}.weight"].parameter for each in together}) > 1
    else:
        shape, block = tensor_of(model, slot).shape, layer.layout.block
        index = (*slot.index, *[slice(None)] * (len(shape) - len(slot.index)))[-2:]
        block = block[::-1] if slot.transposed else block
        splits = any(map(_splits, index, shape[-2:], block))
    how = CAST_ANEW if how == TRAINING_CAST and splits else how
    return f"{how}, one scale with {others}" if others else how


def _splits(cut: Any, size: int, extent: int) -> bool:
    """Whether a slice of a dimension has a part of a block."""
    start, stop, step = cut.indices(size)
    extent = size if extent == WHOLE else extent
    is_whole = step == 1 and start % extent == 0 and (stop % extent == 0 or stop == size)
    return extent > 1 and not is_whole


def _plain(tensor: Tensor) -> Tensor:
    """A parameter or buffer, or a DTensor of plain ones, without its autograd history."""
    rule = stored_by(tensor)
    return (tensor if rule is None else rule.to_plain(tensor)).detach()


def _whole(plain: Tensor) -> Tensor:
    """The whole of a tensor; all ranks call it, if it is sharded."""
    return plain.full_tensor() if kernels.is_sharded(plain) else plain  # type: ignore[attr-defined]


# --- values that cannot be saved


@torch.no_grad()
def check_values(items: Iterable[Item]) -> None:
    """Raise ValueError if the values of parameters cannot be saved; all are read once.

    Of a sharded parameter this rank's part is looked at. Buffers may hold infinities, as masks do.
    """
    bad = [item.name for item in items if item.source.is_meta or not _is_finite(item.source)]
    if bad:
        why = "with NaN or inf (float8.find_nan(model) finds where), or on the meta device"
        raise ValueError(f"nothing was written: {kinds_of(bad)} {why}")


def _is_finite(source: Tensor) -> bool:
    if not isinstance(source, nn.Parameter) or not source.is_floating_point():
        return True
    plain: Any = _plain(source)
    local = plain.to_local() if kernels.is_sharded(plain) else plain
    parts = (local.float8_data.float(), local.scale.float()) if is_resident(local) else (local,)
    # Not isfinite(), which would need memory for each element.
    return all(bool(torch.stack(torch.aminmax(x)).isfinite().all()) for x in parts if x.numel())
