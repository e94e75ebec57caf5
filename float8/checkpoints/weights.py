"""What each parameter and buffer of a model becomes in a float8 checkpoint.

`planned` makes a `Writing` of a model, in the order of the model and without reading data. A
sharded parameter is gathered when its turn comes, on all ranks together, and stays until the next
one is read. Names, and the place of each tensor inside a parameter, are those of ``names.py``;
``casts.py`` says with which bits weights are cast.

A layer that is in float8 in the model is so in the file. All else stays as it is: embeddings,
norms, biases, routers, and layers that were not converted. So does a layer whose weight another
module reads in high precision, as an embedding that is tied to the head; whose config multiplies
the weight in high precision; or whose weight files do not have as a matrix ``NAME.weight``.

The static scale of a layer's input, for layouts that store it, is the first of these: the number
that the user gives by the layer's name, the constant of a static cast, or the current scale of a
delayed cast. With ``smooth_input=True`` a delayed scale is not stored: it is the scale of the input
times factors, for which a file has no place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.arguments import check_module
from float8.checkpoints.casts import CAST_ANEW, TRAINING_CAST, StoredLayer, stored_layer
from float8.checkpoints.files import MAX_SHARD_BYTES, Spec
from float8.checkpoints.layouts import (
    BLOCKS,
    LAYOUTS,
    MXFP4,
    ROWS_OF_32,
    SCHEMES,
    WEIGHT,
    CompressedTensors,
    FineGrained,
    GptOss,
    Layout,
)
from float8.checkpoints.names import Owners, Slot, owners, published, tensor_of
from float8.checkpoints.plan import Writing
from float8.config import ScalingType
from float8.convert.folding import unwrapped
from float8.formats import E4M3, ScaleFormat
from float8.granularity import WHOLE, Tensorwise, block_name
from float8.kernels import mxfp4
from float8.linear.layer import Float8Linear
from float8.linear.module import own_config, stacked_weights
from float8.linear.resident import is_gatherable, is_resident, without_gather


def planned(
    model: nn.Module,
    layout: Layout | str | None,
    input_scales: Mapping[str, float | Tensor] | None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
) -> Writing:
    """What a model becomes in a float8 checkpoint, and how; no data is read.

    The model is converted; it may be compiled, in wrappers, sharded, or on the meta device. For
    ``layout`` see `layout_for`. ``input_scales`` has the static scales of inputs by layer, for
    layouts that store them. Raises ValueError if the model has no layer in float8, or some that the
    layout cannot store. The message names all of them, and the fix.
    """
    check_module(model, "float8.checkpoints")
    readers, layout = owners(model), layout_for(model, layout)
    places = published(model, layout.method)
    in_float8, skipped, projected = _found(model, places, readers, layout)
    for key in sorted(projected):
        if len(places[key].shape) == 3 and key not in in_float8:
            raise ValueError(
                f"{key}: MXFP4 stacks are stored by layout gpt_oss, of its models alone"
            )
    if not in_float8:
        raise ValueError("the model has no layer in float8: convert_to_float8_training converts it")
    given = {name: float(scale) for name, scale in (input_scales or {}).items()}
    layers: dict[str, StoredLayer | str] = {}
    for name, module in in_float8.items():
        slot = places[name + layout.weight_key]
        weight = tensor_of(model, slot)
        names = [name, *(its for its, other, _ in readers[id(weight)] if other is module)]
        scale = next((given[each] for each in names if each in given), None)
        input_scale = _input_scale(module, scale) if layout.static_inputs else None
        part = slot.of(weight) if slot.index and is_resident(weight) else weight
        part = part if layout.dims == 2 else part.mT  # as in `read`
        found = stored_layer(
            name, layout.turned(tuple(slot.shape)), part, layout, input_scale, module
        )
        if isinstance(found, StoredLayer) and found.how == TRAINING_CAST:
            cuts = slot.cuts(weight.shape, layout.block)
            found = replace(found, how=CAST_ANEW) if cuts else found
        layers[name] = found
    known = {*layers, *skipped, *(name for its in readers.values() for name, _, _ in its)}
    for name, own in given.items():
        if name not in known:
            layers[name] = "there is no layer of this name, which input_scales has"
        elif not layout.static_inputs:
            layers[name] = f"it has an input scale, and {layout!r} has dynamic inputs"
        elif not 0 < own < math.inf:
            layers[name] = f"its input scale is {own}; a scale is finite and > 0"
    gathered: dict[str, Tensor] = {}  # the parameter that was read last

    def read(key: str) -> Tensor:
        slot = places[key]
        if slot.parameter not in gathered:
            gathered.clear()
            gathered[slot.parameter] = _whole(tensor_of(model, slot))
        whole = gathered[slot.parameter]
        part = slot.of(whole) if slot.index or slot.transposed else whole
        part = part.mT if layout.dims == 3 and key in in_float8 else part
        return mxfp4.project(part) if key in projected and not is_resident(part) else part

    specs = {key: Spec(tensor_of(model, s).dtype, tuple(s.shape)) for key, s in places.items()}
    stored = {*in_float8.values()}
    left = {  # readers also go by the names of modules, and engines by those of matrices
        its if isinstance(module, nn.Linear) else layout.all_of(its)
        for key, slot in places.items()
        if key.removesuffix(WEIGHT) in skipped
        for its, module, _ in readers[id(tensor_of(model, slot))]
        if module not in stored and not isinstance(module, nn.Embedding)
    }
    model_config: dict[str, Any] = getattr(transformers_config(model), "to_dict", dict)()
    return Writing(layout, specs, layers, skipped, max_shard_bytes, read, model_config, left)


def layout_for(model: nn.Module, layout: Layout | str | None) -> Layout:
    """The layout in which a converted model is stored.

    A `Layout` is returned as it is. A name stands for the variant that stores the scales of the
    model's recipe. None stands for the layout that stores those scales: ``fine_grained`` of 128x128
    blocks, ``compressed_tensors`` of rows, whole tensors and MX blocks. A model of Transformers
    with experts in MX blocks gets ``fine_grained``, which it reads. A model that trains MXFP4
    weights gets ``mxfp4``, one of gpt-oss with experts ``gpt_oss``. Inputs are static where all
    layers cast theirs with constants.
    """
    if isinstance(layout, Layout):
        return layout
    configs = {m: c for m in model.modules() if (c := own_config(m)) is not None}
    gemms = [config.gemms for config in configs.values()]
    casts = [each.output.b for each in gemms if each.output.b is not None]
    # Engines then round the scales of inputs to powers of two, as the recipe does.
    powers = {cast.scale_format for cast in casts} == {ScaleFormat.POWER_OF_TWO}
    scales = ScaleFormat.POWER_OF_TWO if powers else ScaleFormat.FLOAT32
    inputs = {None if (a := each.output.a) is None else a.scaling_type for each in gemms}
    blocks = {cast.block for cast in casts}
    by = next((each for each in SCHEMES if {each.block_of((0, 0))} == blocks), None)
    is_static = by in (None, Tensorwise()) and inputs == {ScalingType.STATIC}
    has_experts = any(not isinstance(module, Float8Linear) for module in configs)
    if layout is None and any(config.mxfp4_weights for config in configs.values()):
        return GptOss() if _is_gpt_oss(model) and has_experts else MXFP4()
    of_transformers = transformers_config(model) is not None
    if layout is None and by == ROWS_OF_32 and has_experts and of_transformers:
        return FineGrained((1, 32), ScaleFormat.E8M0)  # stores the same scales
    named: dict[Any, Layout] = {name: kind() for name, kind in LAYOUTS.items()}
    named["fine_grained"] = FineGrained(scale_format=scales)
    named["compressed_tensors"] = CompressedTensors(by or Tensorwise(), is_static)
    if layout is None and by is not None:
        layout = "fine_grained" if by == BLOCKS else "compressed_tensors"
    if layout not in named:
        has = ", ".join(sorted(map(block_name, blocks))) or "no layer in float8: convert it"
        raise ValueError(
            f"layout must be a Layout, such as FineGrained(), or one of {', '.join(LAYOUTS)}; got "
            f"{layout!r}, and the model has {has}"
        )
    return named[layout]


# --- the modules of a model


def _found(
    model: nn.Module, places: Mapping[str, Slot], readers: Owners, layout: Layout
) -> tuple[dict[str, nn.Module], dict[str, str], set[str]]:
    """The layers of a model, perhaps in wrappers, by their names in files.

    Returns those that the file has in float8; the linear ones that stay in high precision, with the
    reason; and the keys of the weights that are trained as MXFP4, in whatever way they are stored.
    """
    reasons = {  # why a conversion has left a module alone
        inside.get(name): why
        for module in model.modules()
        if (report := module.__dict__.get("float8_conversion")) is not None
        for inside in [dict(module.named_modules())]
        for name, why in report.skipped.items()
    }
    trains_mxfp4 = any(c.mxfp4_weights for m in model.modules() if (c := own_config(m)) is not None)
    listed = (getattr(module, "_keep_in_fp32_modules", None) or () for module in model.modules())
    kept = tuple({end for ends in listed for end in ends})  # ends of names
    in_float8: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    projected: set[str] = set()
    for key, slot in places.items():
        parent, _, own = slot.parameter.rpartition(".")
        module, name = model.get_submodule(parent), key.removesuffix(WEIGHT)
        is_matrix = key.endswith(WEIGHT) and len(slot.shape) == 2
        is_stack = len(slot.shape) == 3 and "Expert" in type(module).__name__
        fits = is_matrix if layout.dims == 2 else getattr(module, "is_transposed", False)
        if (config := _multiplies_in_float8(module, own)) is not None:
            others = [
                f"{its}.{n} ({type(other).__name__})"
                for its, other, n in readers[id(tensor_of(model, slot))]
                if _multiplies_in_float8(other, n) is None
            ]
            is_trained = config.mxfp4_weights or not trains_mxfp4
            if others:
                skipped[name] = f"its weight is also {others[0]}, which reads it in high precision"
            elif config.gemms.output.b is None and not (layout.is_mxfp4 and config.mxfp4_weights):
                skipped[name] = "its config multiplies the weight in high precision"
            elif not fits or parent.endswith(kept):
                skipped[name] = _unfit(model, key, slot, layout)
            elif layout.is_mxfp4 and not is_trained:
                skipped[name] = "it does not train with mxfp4_weights=True, as others do"
            else:
                in_float8[name] = module
            projected |= {key} if config.mxfp4_weights and not others else set()
        elif is_stack or (is_matrix and not isinstance(module, nn.Embedding)):
            kind = type(module).__name__.removeprefix("FSDP")  # which fully_shard adds
            skipped[name] = reasons.get(module, f"it is a {kind} that was not converted")
    for sharing in readers.values():  # linear layers that have no weight of their own in the file
        for name, module, own in sharing:
            other = next((n for n, m, _ in sharing if m is not module), None)
            is_linear = isinstance(module, nn.Linear) and own == "weight"
            if other and is_linear and name not in in_float8:
                skipped.setdefault(name, f"its weight is that of {other}")
    return in_float8, skipped, projected


def _unfit(model: nn.Module, key: str, slot: Slot, layout: Layout) -> str:
    """Why a layout does not have a weight that the model multiplies in float8."""
    if layout.dims == 3:
        return "the layout is one of experts"
    if len(slot.shape) == 2 and key.endswith(WEIGHT):
        return "Transformers keeps it in high precision (_keep_in_fp32_modules)"
    dtype = str(tensor_of(model, slot).dtype).removeprefix("torch.")
    has = f"{key.rpartition('.')[2]} of shape {tuple(slot.shape)}"
    why = f"it trains in float8 and is saved in {dtype}, because files have it as {has}"
    return f"{why}; mxfp4_weights=True stores it in MXFP4" if _is_gpt_oss(model) else why


def _multiplies_in_float8(module: nn.Module, name: str) -> Any:
    """The config of the module whose weight a parameter is, or None."""
    own = ["weight"] if isinstance(module, Float8Linear) else stacked_weights(module)
    return own_config(module) if name in own else None


def _is_gpt_oss(model: nn.Module) -> bool:
    return getattr(transformers_config(model), "model_type", "") == GptOss.name


def transformers_config(model: nn.Module) -> Any:
    """The config of a model of Transformers, perhaps in wrappers; None of others."""
    config = getattr(unwrapped(model), "config", None)
    return config if hasattr(config, "to_json_string") else None


def _input_scale(module: nn.Module, given: float | None) -> Tensor | None:
    """The static scale of a layer's input, float32 of shape (); None if there is none."""
    config = module.config if isinstance(module, Float8Linear) else None
    cast = None if config is None or config.smooth_input else config.gemms.output.a
    if given is None and cast is not None and cast.format == E4M3 and set(cast.block) == {WHOLE}:
        given = None if cast.static_scale is None else float(cast.static_scale)
        state: Any = module.states[0]  # type: ignore[index]
        if given is None and state is not None and (state.ready or state.scale.is_meta):
            return state.scale.detach()
    return None if given is None else torch.tensor(given, dtype=torch.float32)


# --- the tensors of a parameter


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a parameter or buffer, without its autograd history; all ranks call it."""
    plain: Any = (without_gather(tensor) if is_gatherable(tensor) else tensor).detach()
    return plain.full_tensor() if kernels.is_sharded(plain) else plain
