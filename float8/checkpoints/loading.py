"""`load`: a float8 checkpoint of another library becomes the weights of a model.

============== ======================================= ==========================================
``weights=``   layers that the files have in float8    for
============== ======================================= ==========================================
high_precision dequantised into the model's parameters a base to train on, in any precision
float8         `Float8Linear`, frozen float8 weights   evaluation, and adapters (LoRA) on top
============== ======================================= ==========================================

All else (norms, embeddings, biases, layers that the files have in high precision) is copied. Files
without any float8 weight load too.

**Nothing changes when it raises.** All names, shapes, dtypes and scales are checked first
(`float8.checkpoints.source`), and all layers that are converted. Only then is data copied, tensor
by tensor, from files that are mapped into memory one at a time. Parameters keep their memory; those
on the meta device get some.

**Layers that keep float8 weights** cast their inputs as the layout says: per 128 values of a token
(``fine_grained``), per token or with the scale of the file (``compressed_tensors``, ``modelopt``),
or 1x32 (MX and MXFP4). E8M0 scales of 128x128 blocks become float32, exactly. The weights are
frozen, and gradients pass to the input. Experts keep a stack in float8 if the files have all of it
so, and not as MXFP4. Inputs of experts have no scale of the file, and a scale per matrix becomes
one per row of the stack.

**The first scales of a training.** Histories of delayed casts start anew, so that all first casts
find their own scales, that of a weight from the dequantised weight. With the granularity of the
file it is the file's scale to the rounding of the parameter's dtype, and the float8 data are the
same, wherever the largest float8 value of the block is 448, as after a cast to float32 scales. With
scales that are powers of two it is the same scale where that value is above 224.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from float8.arguments import check_module, check_type
from float8.checkpoints.layouts import ROWS_OF_32, WEIGHT, Layout
from float8.checkpoints.names import Slot, owners, published, tensor_of, within
from float8.checkpoints.source import Source, told
from float8.config import RECIPES, CastConfig, Float8LinearConfig, ScalingType
from float8.convert.conversion import ConversionPlan, plan_conversion
from float8.convert.filters import Because
from float8.convert.folding import named
from float8.convert.inference import hide_from_ddp, reason_against_inference
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, ScaleFormat
from float8.granularity import WHOLE, Blockwise, Rowwise, Tensorwise, ceil_div, scale_shape
from float8.kernels import e8m0, is_sharded
from float8.kernels.matrix import ROW, TENSOR
from float8.linear.layer import Float8Linear
from float8.linear.module import own_config, weights_of
from float8.linear.resident import as_parameter, contraction_last, to_resident
from float8.tensor import Float8Shard, Float8Tensor
from float8.tensor.tensor import is_e8m0

__all__ = ["load"]

Box = tuple[slice, ...]  # start and stop along each dimension

HIGH_PRECISION, FLOAT8 = MODES = "high_precision", "float8"
_IN_HIGH_PRECISION = "the checkpoint has its weight in high precision"
_DEQUANTISED = (
    "its weight is dequantised: another module has it too, or not all of its parts in the files "
    "are in float8, or they split a block"
)
_SHARDED = (
    'its weight is sharded already: on a model on the meta device call load(..., "float8", '
    'device="meta"), then fully_shard, then load(..., "float8") again'
)
_OTHER_CASTS = "it is in float8 by another config than that of the files: load them by one first"


def load(
    model: nn.Module,
    path: str | Path,
    weights: str = HIGH_PRECISION,
    *,
    ignore: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Load a float8 checkpoint, or a plain one, into a model, in place.

    Args:
        model: with the names and shapes of the checkpoint, plain or converted for training. Its
            parameters may be on the meta device. ``fully_shard`` may have sharded them: each rank
            then reads its part. For ``weights="float8"`` they are in float8 before that: load
            with ``device="meta"``, shard, and load again.
        path: a folder of safetensors files with ``config.json``, or one file beside it.
        weights: what the layers become that the files have in float8. ``"high_precision"``: the
            model's own layers with dequantised weights, converted for training or not.
            ``"float8"``: `Float8Linear` layers and experts with the files' float8 weights, frozen.
        ignore: patterns of keys to leave out, such as ``"*.k_scale"``: keys that only the files or
            only the model have, and keys whose values in the model stay.
        device: where parameters on the meta device get their memory.

    Returns:
        ``model``, or the new layer if ``model`` itself was one and was converted.

    Raises:
        FileNotFoundError: there is no such folder or file, or a shard is missing.
        ValueError: the files are damaged, contradict their config, or do not fit the model; or a
            layer cannot be converted. Nothing has changed then.
        TypeError: arguments of other types.
    """
    check_module(model, "load")
    check_type(ignore, (list, tuple), "load", "ignore", 'a list of patterns, as ["*.k_scale"]')
    _check_mode(model, weights)
    device, source = torch.device(device), Source(path)
    tie = getattr(model, "tie_weights", None)  # which accelerate's empty models lose
    if callable(tie) and any(p.is_meta and not is_sharded(p) for p in model.parameters()):
        tie()
    slots = matched(model, source, ignore)
    plan = None
    if weights == FLOAT8:
        stored = _stored(model, source, slots)
        keys = slots.keys() & {name + source.weight_key for name in source.layers}
        in_float8 = {id(tensor_of(model, slots[key])) for key in keys}
        plan = _planned(model, stored, in_float8)
        if not plan.layers:
            raise ValueError(
                f"nothing was loaded from {source.path}, of which {len(source.layers)} weights are "
                f'in float8: no layer can be converted, and weights="{HIGH_PRECISION}" converts '
                f"none:{plan.reasons}"
            )
        plan.check(_refused_float8(source, stored, plan, device))
        model = plan.convert(model)  # which changes from here on
        _make_float8(plan, device)
    materialise(model, device)
    for key, slot in slots.items():
        parameter = tensor_of(model, slot)
        # A float8 weight dequantises to this dtype on its way to a parameter.
        is_wide = parameter.dtype in HIGH_PRECISION_DTYPES
        write(slot, parameter, source.read(key, parameter.dtype if is_wide else torch.float32))
    for layer in model.modules():
        for cast in layer.casts if isinstance(layer, Float8Linear) else ():
            cast.start_beside(layer.weight)  # type: ignore[arg-type]
    if plan is not None:
        hide_from_ddp(model)
        plan.finish(model)
    # Transformers' save_pretrained would write it beside weights that are not stored so.
    model_config: Any = getattr(model, "config", None)
    if hasattr(model_config, "to_json_string") and "quantization_config" in vars(model_config):
        del model_config.quantization_config
    return model


def _check_mode(model: nn.Module, weights: str) -> None:
    """Raise if the model does not fit the mode."""
    if weights not in MODES:
        modes = " or ".join(map(repr, MODES))
        raise ValueError(f"load: weights must be {modes}, got {weights!r}")
    for fqn, layer in model.named_modules():
        if own_config(layer) is None:
            continue
        if any(map(_in_float8, weights_of(layer).values())) != (weights == FLOAT8):
            remedy = "convert_from_float8_training(model) first"
            raise ValueError(f"load: {named(fqn)} is in float8 already: {remedy}")


# --- which tensors go where


def matched(model: nn.Module, source: Source, ignore: Sequence[str]) -> dict[str, Slot]:
    """The place in the model of each tensor of the files that is loaded.

    A weight that modules share may be in the files under any of its names. ``ignore`` has patterns
    of keys to leave out, besides those that a model of Transformers leaves out. Raises ValueError
    if keys are missing or unexpected, or if shapes or dtypes differ.
    """
    method = "" if source.layout is None else source.layout.method
    readers, slots = owners(model), published(model, method)
    places = {  # every name of a tensor -> its key
        within(name, own): key
        for key, slot in slots.items()
        if not slot.index
        for name, _, own in readers[id(tensor_of(model, slot))]
    } | {key: key for key in slots}
    found: dict[str, Slot] = {}
    problems: list[str] = []
    filled: dict[str, str] = {}  # key of the model -> that of the files
    for key, spec in source.weights.items():
        own, reason = places.get(key), None
        if any(fnmatchcase(key, pattern) for pattern in ignore):
            continue
        if own is None:
            is_left = _leaves_out(model, "_keys_to_ignore_on_load_unexpected", key)
            reason = None if is_left else "is not in the model"
        elif own in filled:
            a, b = source.read(filled[own]), source.read(key)
            if type(a) is not type(b) or a.dtype != b.dtype or not torch.equal(a, b):
                reason = f"differs from {filled[own]}, and the model has one tensor for both; "
                reason += "ignore one, or untie them"
        else:
            filled[own], found[key] = key, slots[own]
            shape, dtype = tuple(slots[own].shape), tensor_of(model, slots[own]).dtype
            if (spec.shape, spec.dtype.is_floating_point) != (shape, dtype.is_floating_point):
                reason = (
                    f"is {spec.dtype} of shape {spec.shape}, and the model's {dtype} of {shape}"
                )
        if reason is not None:
            problems.append(f"{source.place(key)} {reason}")
    for key, slot in slots.items():
        tensor = tensor_of(model, slot)
        is_left = any(fnmatchcase(key, pattern) for pattern in ignore)
        is_left = is_left or _leaves_out(model, "_keys_to_ignore_on_load_missing", key)
        if key not in filled and (tensor.is_meta or not is_left):
            is_meta = ", and on the meta device: initialise it before" if tensor.is_meta else ""
            problems.append(f"{key} of the model is missing{is_meta}")
    if problems:
        what = f"nothing was loaded from {source.path}, because it does not fit the model"
        end = "\nignore=[...] leaves keys out, by name or pattern"
        raise ValueError(told(what, problems) + end)
    return found


def _leaves_out(model: nn.Module, attribute: str, key: str) -> bool:
    """Whether a model of Transformers lists a key as one to leave out, or it scales a KV cache."""
    listed = [p for m in model.modules() for p in getattr(m, attribute, None) or ()]
    listed += [r"\.(k|v|kv)_scale$"] if attribute.endswith("unexpected") else []
    return any(re.search(pattern, key) for pattern in listed)


# --- layers that are converted


def _stored(model: nn.Module, source: Source, slots: Mapping[str, Slot]) -> dict[str, str]:
    """Name in the model -> name in the files, of layers and experts with weights of their own.

    Of experts it is one of their matrices, all of which are in float8 and split no block.
    """
    found: dict[str, str] = {}
    left: set[str] = set()
    packed = source.layout is not None and source.layout.is_mxfp4
    block = TENSOR if source.layout is None else source.layout.block
    block = ROW if block == TENSOR else block  # see `config_of`
    for key, slot in slots.items():
        fqn, name = slot.parameter.rpartition(".")[0], key.removesuffix(WEIGHT)
        shape = tensor_of(model, slot).shape
        is_part = len(shape) == 3
        if is_part and packed:
            left.add(fqn)
        elif name in source.layers and not slot.cuts(shape, block):
            found |= {fqn: name} if is_part or not (slot.index or slot.transposed) else {}
        elif is_part:
            left.add(fqn)
    return {fqn: name for fqn, name in found.items() if fqn not in left}


def _planned(model: nn.Module, stored: Mapping[str, str], in_float8: set[int]) -> ConversionPlan:
    """The layers that keep the weights of the files.

    Those of ``stored``; ``in_float8`` are the ids of all weights that the files have in float8.
    """

    def reason(module: nn.Module, fqn: str) -> str | None:
        if fqn in stored:
            return None
        dequantised = any(id(parameter) in in_float8 for parameter in module._parameters.values())
        return _DEQUANTISED if dequantised else _IN_HIGH_PRECISION

    # Of any sizes: `reason_against_inference` asks the device.
    config = Float8LinearConfig(emulate=True)
    return plan_conversion(model, config, Because(reason), "load", replaces_weights=True)


def config_of(
    layout: Layout, input_scale: Tensor | None = None, stacked: bool = False
) -> Float8LinearConfig:
    """The config of a layer that a checkpoint stores in a layout.

    ``input_scale`` is None where the layer's inputs are not cast with a static scale. Experts are
    ``stacked``: their inputs have dynamic scales. Where files have one scale per matrix, their
    weights have it in each row, since a stack joins matrices of other scales.
    """
    granularity, scales = layout.granularity, layout.scale_format
    if stacked and granularity == Tensorwise():
        granularity = Rowwise()
    if scales.is_e8m0 and granularity in (ROWS_OF_32, Blockwise(32, 32)):
        return RECIPES["mxfp8" if granularity == ROWS_OF_32 else "mxfp8_2d"]
    if scales is not ScaleFormat.FLOAT32:
        scales = ScaleFormat.POWER_OF_TWO
    weight = CastConfig(granularity=granularity, target_dtype=E4M3.dtype, scale_format=scales)
    if isinstance(granularity, Blockwise):
        row = replace(weight, granularity=Blockwise(1, granularity.cols))
        output = RECIPES["blockwise"].gemm_config_output
        return Float8LinearConfig(row, weight, row, gemm_config_output=output)
    row = replace(weight, granularity=Rowwise())
    gradient = CastConfig() if granularity == Tensorwise() else row
    if input_scale is not None and not stacked:
        scale = float(input_scale)
        row = CastConfig(ScalingType.STATIC, target_dtype=E4M3.dtype, static_scale=scale)
    return Float8LinearConfig(row, weight, gradient)


def _refused_float8(
    source: Source, stored: Mapping[str, str], plan: ConversionPlan, device: torch.device
) -> Iterator[tuple[str, str | None]]:
    """Give each layer of a plan its config; name and reason, of those that cannot keep float8.

    ``device`` is that of weights that are on the meta device.
    """
    assert source.layout is not None
    for fqn, layer in plan.layers.items():
        _, input_scale = source.layer(stored[fqn], torch.float32)
        own, weights = own_config(layer), weights_of(layer).values()
        stacked = any(weight.dim() == 3 for weight in weights)
        plan.configs[fqn] = config = config_of(source.layout, input_scale, stacked)
        if own is not None:
            yield fqn, None if own == config else _OTHER_CASTS
            continue
        for weight in weights:
            place = device if weight.is_meta else weight.device
            refused = reason_against_inference(weight, config, place)
            yield fqn, _SHARDED if is_sharded(weight) else refused


@torch.inference_mode(False)  # a backward cannot save tensors that were made in inference mode
def _make_float8(plan: ConversionPlan, device: torch.device) -> None:
    """Replace the weights of converted layers by frozen float8 ones, whose values are not set."""
    for fqn, layer in plan.layers.items():
        for name, old in weights_of(layer).items():
            if not _in_float8(old):
                like = to_resident(contraction_last(layer, old.to("meta")), plan.configs[fqn])
                own = torch.empty_like(like, device=device if old.is_meta else old.device)
                own = contraction_last(layer, own)
                setattr(layer, name, as_parameter(old, own, requires_grad=False))


def _in_float8(weight: Any) -> bool:
    """Whether a weight, or this rank's part of it, is in float8."""
    return isinstance(getattr(weight, "_local_tensor", weight), (Float8Tensor, Float8Shard))


# --- parameters: their memory, and the part of them that this rank has

# A tensor of a file goes to a `Slot` of a parameter: all of it, or one expert's part of a stack. A
# parameter that FSDP2 has sharded has a box of the whole on this rank; `write` copies what the two
# have in common. No rank reads more, except float8 blocks that the border of a shard
# splits.


@torch.inference_mode(False)  # a backward cannot save tensors that were made in inference mode
def materialise(model: nn.Module, device: torch.device) -> None:
    """Give parameters and persistent buffers on the meta device memory; shared ones stay shared."""
    new: dict[int, tuple[Tensor, Any]] = {}  # id -> the old one, whose id stays its, and the new
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, own in entries.items():
                if own is None or not own.is_meta or name in module._non_persistent_buffers_set:
                    continue
                if id(own) not in new:
                    data = torch.empty_like(own, device=device, requires_grad=False)
                    if isinstance(own, nn.Parameter):
                        data = as_parameter(own, data, own.requires_grad)
                    new[id(own)] = own, data
                entries[name] = new[id(own)][1]


@torch.no_grad()
def write(slot: Slot, parameter: Tensor, source: Tensor) -> None:
    """Copy a tensor of a file into its slot: into a float8 weight as it is, else dequantised.

    ``source`` has the slot's shape. If ``parameter``, that of the slot, is a DTensor, it gets the
    part that this rank has.
    """
    local, offset = _local(parameter)
    if not isinstance(local, (Float8Tensor, Float8Shard)):
        _copy(slot, parameter.shape, local, offset, source)
        return
    assert isinstance(source, Float8Tensor)
    size, block = parameter.shape, local.block
    shape, scales = scale_shape(size, block), slot.of_scales(size, block)
    scale = source.scale if is_e8m0(local.scale) else e8m0.as_float32(source.scale)
    start = offset if local.scale.shape[0] < shape[0] else (0,) * len(shape)  # or it has all scales
    _copy(slot, size, local.float8_data, offset, source.float8_data)
    _copy(scales, shape, local.scale, start, scale.expand(scales.shape))


def _copy(
    slot: Slot, shape: Sequence[int], local: Tensor, offset: tuple[int, ...], source: Tensor
) -> None:
    """Copy what a part of a tensor of this shape, which starts at an offset, has of a slot."""
    target, box = _overlap(slot, shape, local.shape, offset)
    if target is not None:
        view = local[target]
        (view.mT if slot.transposed else view).copy_(_plain(source, box))


def _local(parameter: Any) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and where it starts in the whole."""
    if not is_sharded(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter._local_tensor.detach(), offset


def _overlap(
    slot: Slot, shape: Sequence[int], local: torch.Size, offset: tuple[int, ...]
) -> tuple[tuple[int | slice, ...] | None, Box]:
    """What this rank has of a slot: its index in the local part, and the box of the source.

    The index is None where they have nothing in common.
    """
    index = slot.index or (slice(None),) * len(shape)
    target: list[int | slice] = []
    box: list[slice] = []
    for entry, size, own, start in zip(index, shape, local, offset, strict=True):
        part = range(size)[entry if isinstance(entry, slice) else slice(entry, entry + 1)]
        begin, end = max(part.start, start), min(part.stop, start + own)
        if begin >= end:
            return None, ()
        if isinstance(entry, slice):
            target.append(slice(begin - start, end - start))
            box.append(slice(begin - part.start, end - part.start))
        else:
            target.append(entry - start)
    if slot.transposed:
        box[-2:] = reversed(box[-2:])
    return tuple(target), tuple(box)


def _plain(source: Tensor, box: Box) -> Tensor:
    """A part of a tensor in high precision; blocks that the box splits are dequantised whole."""
    if not isinstance(source, Float8Tensor):
        return source[box]
    wide, inside = [], []
    for part, size, block in zip(box, source.shape, source.block, strict=True):
        extent = 1 if block == WHOLE else block
        first = part.start // extent * extent
        wide.append(slice(first, min(ceil_div(part.stop, extent) * extent, size)))
        inside.append(slice(part.start - first, part.stop - first))
    return source[tuple(wide)].dequantize()[tuple(inside)]
