"""`load`: a float8 checkpoint of another library becomes the weights of a model.

============== ======================================= ==========================================
``weights=``   layers that the files have in float8    for
============== ======================================= ==========================================
high_precision dequantised into the model's parameters a base to train on, in any precision
float8         `Float8Linear`, frozen float8 weights   evaluation, and adapters (LoRA) on top
training       as high_precision; delayed casts start  float8 training
               with the scales of the files
============== ======================================= ==========================================

All else (norms, embeddings, biases, layers that the files have in high precision) is copied. Files
without any float8 weight load too.

**Nothing changes when it raises.** All names, shapes, dtypes and scales are checked first
(`float8.checkpoints.source`), and all layers that are converted. Only then is data copied, tensor
by tensor, from files that are mapped into memory one at a time. Parameters keep their memory; those
on the meta device get some.

**Layers that keep float8 weights** cast their inputs as the layout says: per 128 values of a token
(``fine_grained``), per token or with the scale of the file (``compressed_tensors``, ``modelopt``),
or 1x32 (MX). E8M0 scales of 128x128 blocks become float32, exactly. The weights are frozen, and
gradients pass to the input.

**The first scales of a training.** A delayed cast of a weight starts with the scale of the file,
where that is one per tensor, and casts inputs with the file's ``input_scale``, if it has one. A
dynamic cast finds its own scale, from the dequantised weight. With the granularity of the file it
finds the file's scale to the rounding of the parameter's dtype, and the same float8 data, wherever
the largest float8 value of the block is 448, as after a cast to float32 scales. With scales that
are powers of two it finds the same scale and data where that value is above 224.
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

from float8.arguments import check_module, check_type, described
from float8.checkpoints.layouts import Layout
from float8.checkpoints.names import Slot, published
from float8.checkpoints.parameters import materialise, write
from float8.checkpoints.source import WEIGHT, Source, told
from float8.config import RECIPES, CastConfig, Float8LinearConfig, ScalingType, check_config
from float8.convert.conversion import (
    ConversionPlan,
    own_config,
    plan_conversion,
    sharded_before,
)
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import NO_REASON
from float8.convert.folding import named
from float8.convert.inference import hide_from_ddp, refuses_device
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, ScaleFormat
from float8.granularity import Blockwise, Rowwise, Tensorwise
from float8.kernels import e8m0, is_sharded
from float8.linear.delayed import DelayedCast
from float8.linear.float8_weight import as_parameter, is_resident
from float8.linear.layer import Float8Linear
from float8.tensor import Float8Tensor

__all__ = ["load"]

HIGH_PRECISION, FLOAT8, TRAINING = MODES = "high_precision", "float8", "training"
_IN_HIGH_PRECISION = "the checkpoint has its weight in high precision"
_SHARDED = (
    "its weight is sharded, and fully_shard gathers no frozen float8 weights: give each rank the "
    'whole model, or load with weights="high_precision"'
)


def load(
    model: nn.Module,
    path: str | Path,
    weights: str = HIGH_PRECISION,
    *,
    config: Float8LinearConfig | str | None = None,
    ignore: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Load a float8 checkpoint, or a plain one, into a model, in place.

    Args:
        model: with the names and shapes of the checkpoint, as `published` has them; plain, or
            converted for training. Its parameters may be on the meta device. ``fully_shard`` may
            have sharded them, but not for ``weights="float8"``: each rank reads its part.
        path: a folder of safetensors files with ``config.json``, or one file beside it.
        weights: ``"high_precision"``, ``"float8"`` or ``"training"``: what becomes of layers in
            float8, as the docstring of this file says.
        config: with ``weights="training"`` and a plain model: converts the layers that the
            checkpoint has in float8. A model for ``fully_shard`` is converted before it instead.
        ignore: patterns such as ``"*.k_scale"``, of keys that only the files or only the model
            have, and of keys to leave as they are in the model.
        device: of parameters that are on the meta device.

    Returns:
        ``model``, or the new layer if ``model`` itself was one and was converted.

    Raises:
        FileNotFoundError: there is no such folder or file, or a shard is missing.
        ValueError: the files are damaged, contradict their config, or do not fit the model; or a
            layer cannot be converted. Nothing has changed then.
        TypeError: arguments of other types.
    """
    device = _checked(model, path, weights, config, ignore, device)
    source = Source(path)
    _tie_on_meta(model)
    slots = matched(model, source, tuple(ignore))
    stored = _stored_layers(source, slots)
    wanted = set() if config is None else _in_float8(model, source, slots)

    def is_wanted(module: nn.Module, fqn: str) -> bool:
        return fqn in wanted

    plan = None
    if weights == FLOAT8:
        plan = _plan_of_float8(model, source, stored, device)
    elif config is not None:
        plan = plan_conversion(model, config, is_wanted, "load")
    if plan is not None and not plan.layers:
        why = f"no layer of the model can be converted:{plan.reasons}"
        raise ValueError(
            f'nothing was loaded from {source.path}: weights="{weights}", and '
            f"{why if source.layers else 'the checkpoint has no weight in float8'}\n"
            f'weights="{HIGH_PRECISION}" loads it into any model'
        )
    if plan is not None and weights == TRAINING:
        plan.check(sharded_before(model, plan))
    # The model changes from here on.
    kept: set[str] = set()
    if plan is not None and weights == FLOAT8:
        model, kept = plan.convert(model), set(plan.layers)
        _keep_float8(source, stored, plan, device)
    materialise(model, device)
    if config is not None:
        model = convert_to_float8_training(model, config=config, module_filter_fn=is_wanted)
        conversion: Any = model.float8_conversion
        skipped = conversion.skipped
        skipped.update({n: _IN_HIGH_PRECISION for n, why in skipped.items() if why == NO_REASON})
    for key, slot in slots.items():
        if _layer_of(slot) not in kept or not key.endswith(WEIGHT):
            parameter = _tensor_of(model, slot.parameter)
            write(slot, parameter, source.read(key, _dtype_of(parameter)))
    _start_casts(model, source, stored if weights == TRAINING else {})
    if plan is not None and weights == FLOAT8:
        hide_from_ddp(model)
        plan.finish(model)
    # Transformers' save_pretrained would write it beside weights that are not stored so.
    own: Any = getattr(model, "config", None)
    if hasattr(own, "to_json_string") and "quantization_config" in vars(own):
        del own.quantization_config
    return model


def _checked(
    model: nn.Module, path: Any, weights: Any, config: Any, ignore: Any, device: Any
) -> torch.device:
    """The device; raises if an argument has another type, or the model does not fit the mode."""
    check_module(model, "load")
    check_type(path, (str, Path), "load", "path", "a folder or a .safetensors file")
    check_type(ignore, (list, tuple), "load", "ignore", 'a list of patterns, as ["*.k_scale"]')
    for pattern in ignore:
        check_type(pattern, str, "load", "ignore", 'a list of patterns, as ["*.k_scale"]')
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"load: device must be a torch.device, got {described(device)}") from error
    if config is not None:
        check_config(config, "load")
    if weights not in MODES or (config is not None and weights != TRAINING):
        raise ValueError(
            f"load: weights must be one of {', '.join(map(repr, MODES))}, and config is for "
            f"weights={TRAINING!r}, which converts the model; got {described(weights)}"
        )
    layers = {fqn: m for fqn, m in model.named_modules() if own_config(m) is not None}
    converts = weights == FLOAT8 or config is not None
    for fqn, layer in layers.items():
        if converts or is_resident(layer._parameters.get("weight")):
            raise ValueError(
                f"load: {named(fqn)} is in float8 already: call convert_from_float8_training(model)"
                " first" + (", or leave config out" if config is not None else "")
            )
    if weights == TRAINING and not layers and config is None:
        raise ValueError(
            f'load: weights="{TRAINING}" needs a converted model, or config=: '
            'Float8LinearConfig.from_recipe_name("blockwise")'
        )
    return device


def _tie_on_meta(model: nn.Module) -> None:
    """Share tied weights of a model of Transformers again, which accelerate's empty models lose."""
    tie = getattr(model, "tie_weights", None)
    if callable(tie) and any(p.is_meta and not is_sharded(p) for p in model.parameters()):
        tie()


def _tensor_of(model: nn.Module, name: str) -> Tensor:
    prefix, _, last = name.rpartition(".")
    module = model.get_submodule(prefix)
    found = module._parameters.get(last, module._buffers.get(last))
    assert found is not None, name
    return found


def _layer_of(slot: Slot) -> str:
    """The name of the module that has the parameter of a slot."""
    return slot.parameter.rpartition(".")[0]


def _dtype_of(parameter: Tensor) -> torch.dtype:
    """The dtype to which a float8 weight dequantises on its way to a parameter."""
    return parameter.dtype if parameter.dtype in HIGH_PRECISION_DTYPES else torch.float32


# --- which tensors go where


def matched(model: nn.Module, source: Source, ignore: Sequence[str]) -> dict[str, Slot]:
    """The place in the model of each tensor of the files that is loaded.

    A weight that modules share may be in the files under any of its names. ``ignore`` has patterns
    of keys to leave out, besides those that a model of Transformers leaves out. Raises ValueError
    if keys are missing or unexpected, or if shapes or dtypes differ.
    """
    slots = published(model)
    places = {key: key for key in slots}
    by_tensor = {id(_tensor_of(model, s.parameter)): key for key, s in slots.items() if not s.index}
    named_tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named_tensors:
        if id(tensor) in by_tensor:
            places.setdefault(name, by_tensor[id(tensor)])
    found: dict[str, Slot] = {}
    problems: list[str] = []
    filled: dict[str, str] = {}  # key of the model -> that of the files
    for key in source.weights:
        if any(fnmatchcase(key, pattern) for pattern in ignore):
            continue
        if (own := places.get(key)) is None:
            if not _leaves_out(model, "_keys_to_ignore_on_load_unexpected", key):
                problems.append(f"{source.place(key)} is not in the model")
            continue
        slot, reason = slots[own], None
        if own in filled:
            reason = _differs(source, filled[own], key)
        else:
            filled[own], found[key] = key, slot
            reason = _misfit(source, key, _tensor_of(model, slot.parameter), slot)
        if reason is not None:
            problems.append(f"{source.place(key)} {reason}")
    problems += _not_filled(model, slots, filled, ignore)
    if problems:
        what = f"nothing was loaded from {source.path}, because it does not fit the model"
        raise ValueError(
            told(what, problems) + "\nignore=[...] leaves keys out, by name or pattern"
        )
    return found


def _not_filled(
    model: nn.Module, slots: Mapping[str, Slot], filled: Mapping[str, str], ignore: Sequence[str]
) -> Iterator[str]:
    """Keys of the model that are missing, and tensors that would have no values."""
    for key, slot in slots.items():
        tensor = _tensor_of(model, slot.parameter)
        is_left = key in filled or any(fnmatchcase(key, pattern) for pattern in ignore)
        if not (is_left or _leaves_out(model, "_keys_to_ignore_on_load_missing", key)):
            yield f"{key} of the model is missing"
        if tensor.is_meta and is_sharded(tensor):
            yield f"{key} is sharded on the meta device: call model.to_empty(device=...) first"
        elif tensor.is_meta and key not in filled:
            yield f"{key} is on the meta device and gets no values: initialise it before"


def _leaves_out(model: nn.Module, attribute: str, key: str) -> bool:
    """Whether a model of Transformers lists a key as one to leave out."""
    listed = [p for m in model.modules() for p in getattr(m, attribute, None) or ()]
    return any(re.search(pattern, key) for pattern in listed)


def _misfit(source: Source, key: str, parameter: Tensor, slot: Slot) -> str | None:
    """The reason why a tensor of the files cannot go to a slot, or None."""
    dtype, shape = source.specs[key].dtype, source.specs[key].shape
    if shape != tuple(slot.shape):
        return f"has shape {shape}, and the model's is {tuple(slot.shape)}"
    if dtype.is_floating_point != parameter.dtype.is_floating_point:
        return f"is {dtype}, and the model's is {parameter.dtype}"
    return None


def _differs(source: Source, first: str, second: str) -> str | None:
    """The reason why two names of one tensor cannot both be right, or None."""
    a, b = source.read(first, torch.float32), source.read(second, torch.float32)
    if type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b):
        return None
    return f"differs from {first}, and the model has one tensor for both; ignore one, or untie them"


def _in_float8(model: nn.Module, source: Source, slots: Mapping[str, Slot]) -> set[str]:
    """The modules whose weights the files have in float8, and layers that share such a weight."""
    names = {_layer_of(slots[key]) for name in source.layers if (key := name + WEIGHT) in slots}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    weights = {id(linears[n].weight) for n in names if n in linears}
    return names | {n for n, linear in linears.items() if id(linear.weight) in weights}


def _stored_layers(source: Source, slots: Mapping[str, Slot]) -> dict[str, str]:
    """Name in the model -> name in the files, of layers in float8 with a weight of their own."""
    own = {name: slots[key] for name in source.layers if (key := name + WEIGHT) in slots}
    return {_layer_of(s): name for name, s in own.items() if not (s.index or s.transposed)}


# --- layers that keep float8 weights


def config_of(layout: Layout, input_scale: Tensor | None = None) -> Float8LinearConfig:
    """The config of a layer that a checkpoint stores in a layout.

    ``input_scale`` is None where the layer's inputs are not cast with a static scale.
    """
    granularity, scales = layout.granularity, layout.scale_format
    if scales.is_e8m0 and granularity == Blockwise(1, 32):
        return RECIPES["mxfp8"]
    if scales is not ScaleFormat.FLOAT32:
        scales = ScaleFormat.POWER_OF_TWO
    weight = CastConfig(granularity=granularity, target_dtype=E4M3.dtype, scale_format=scales)
    if isinstance(granularity, Blockwise):
        row = replace(weight, granularity=Blockwise(1, granularity.cols))
        output = RECIPES["blockwise"].gemm_config_output
        return Float8LinearConfig(row, weight, row, gemm_config_output=output)
    row = replace(weight, granularity=Rowwise())
    gradient = CastConfig() if granularity == Tensorwise() else row
    if input_scale is not None:
        scale = float(input_scale)
        row = CastConfig(ScalingType.STATIC, target_dtype=E4M3.dtype, static_scale=scale)
    return Float8LinearConfig(row, weight, gradient)


def _plan_of_float8(
    model: nn.Module, source: Source, stored: Mapping[str, str], device: torch.device
) -> ConversionPlan:
    """The layers of a plain model that keep the float8 weights of the files, each with its config.

    ``device`` is that of weights that are on the meta device. Raises ValueError if a layer cannot
    keep its weight; nothing has been changed then.
    """
    weights = {fqn: _tensor_of(model, f"{fqn}.weight".lstrip(".")) for fqn in stored}
    any_size = Float8LinearConfig(emulate=True)  # refuses_device asks what the device takes
    plan = plan_conversion(
        model, any_size, lambda _, fqn: fqn in stored, "load", replaces_weights=True
    )
    plan.module_filter_fn = None
    shared = {id(weight): fqn for fqn, weight in weights.items() if fqn not in plan.layers}
    for fqn, reason in plan.conversion.skipped.items():
        if reason == NO_REASON:
            other = shared.get(id(model.get_submodule(fqn)._parameters.get("weight")))
            also = f"its weight is that of {other} too, and dequantised"
            plan.conversion.skipped[fqn] = _IN_HIGH_PRECISION if other is None else also
    refused = {fqn: _SHARDED for fqn, weight in weights.items() if is_sharded(weight)}
    for fqn in plan.layers:
        assert source.layout is not None
        weight = weights[fqn]
        layer = source.layer(stored[fqn], _dtype_of(weight))
        plan.configs[fqn] = config_of(source.layout, layer.input_scale)
        place = device if weight.is_meta else weight.device
        if fqn not in refused and (why := refuses_device(weight, plan.configs[fqn], place)):
            refused[fqn] = why
    try:
        plan.check(refused.items())
    except ValueError as error:
        instead = f'weights="{HIGH_PRECISION}" loads dequantised weights'
        raise ValueError(f"nothing was loaded from {source.path}: {error}\n{instead}") from error
    return plan


@torch.no_grad()
@torch.inference_mode(False)  # a backward cannot save tensors that were made in inference mode
def _keep_float8(
    source: Source, stored: Mapping[str, str], plan: ConversionPlan, device: torch.device
) -> None:
    """Replace the weights of converted layers by those of the files, each freed before the next."""
    for fqn, linear in plan.layers.items():
        old: Tensor = linear.weight
        weight = source.layer(stored[fqn], _dtype_of(old)).weight
        place = device if old.is_meta else old.device
        data = torch.empty_like(weight.float8_data, device=place).copy_(weight.float8_data)
        scale = weight.scale if weight.block == (1, 32) else e8m0.as_float32(weight.scale)
        own = Float8Tensor(data, scale.to(place, copy=True), weight.block, weight.dtype)
        linear.weight = as_parameter(old, own, requires_grad=False)


# --- the first scales


def _start_casts(model: nn.Module, source: Source, stored: Mapping[str, str]) -> None:
    """Start the histories of delayed casts anew; with the scales of stored layers that apply."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Float8Linear)}
    for fqn, layer in layers.items():
        for cast in layer.casts:
            if isinstance(cast, DelayedCast):
                cast.start_beside(layer.weight)
        if fqn not in stored:
            continue
        found = source.layer(stored[fqn], torch.float32)
        x, w, _ = layer.casts
        if isinstance(w, DelayedCast) and found.weight.scale.numel() == 1:
            w.start_from(found.weight.scale)
        casts_x = not layer.config.smooth_input  # else it casts the input times factors
        if isinstance(x, DelayedCast) and found.input_scale is not None and casts_x:
            x.start_from(found.input_scale)
