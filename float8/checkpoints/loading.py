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
by tensor, each mapped into memory while it is copied. Parameters keep their memory; those on the
meta device get some.

**The first scales of a training.** A delayed cast of a weight starts with the scale of the file,
where that is one per tensor, and casts inputs with the file's ``input_scale``, if it has one. A
dynamic cast finds its own scale, from the dequantised weight. With the granularity of the file it
finds the file's scale to the rounding of the parameter's dtype, and the same float8 data, wherever
the largest float8 value of the block is 448, as after a cast to float32 scales. With scales that
are powers of two it finds the same scale and data where that value is above 224.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from float8.arguments import check_module, check_type, described
from float8.checkpoints.matching import dtype_of, layer_of, matched, tensor_of
from float8.checkpoints.parameters import materialise, write
from float8.checkpoints.resident import IN_HIGH_PRECISION, keep_float8, plan_of_float8
from float8.checkpoints.source import WEIGHT, Source
from float8.checkpoints.stacks import Slot
from float8.config import Float8LinearConfig, check_config
from float8.convert.conversion import (
    ConversionPlan,
    own_config,
    plan_conversion,
    sharded_before,
)
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import NO_REASON
from float8.convert.folding import named
from float8.convert.inference import hide_from_ddp
from float8.kernels import is_sharded
from float8.linear.delayed import DelayedCast
from float8.linear.float8_weight import is_resident
from float8.linear.layer import Float8Linear

__all__ = ["load"]

HIGH_PRECISION, FLOAT8, TRAINING = MODES = "high_precision", "float8", "training"


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
    _check_arguments(model, path, weights, config, ignore)
    device = _device(device)
    source = Source(path)
    _check_model(model, weights, config)
    _tie_on_meta(model)
    slots = matched(model, source, tuple(ignore))
    plan = None
    if weights == FLOAT8:
        plan = plan_of_float8(model, source, slots, device)
        _check_layers(plan, source, weights)
    elif config is not None:
        wanted = _in_float8(model, source, slots)
        found = plan_conversion(model, config, lambda _, fqn: fqn in wanted, "load")
        _check_layers(found, source, weights)
        found.check(sharded_before(model, found))
    # The model changes from here on.
    if plan is not None:
        model = plan.convert(model)
        keep_float8(source, slots, plan, device)
    materialise(model, device)
    if config is not None:
        model = convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, fqn: fqn in wanted
        )
        conversion: Any = model.float8_conversion
        skipped = conversion.skipped
        skipped.update({n: IN_HIGH_PRECISION for n, why in skipped.items() if why == NO_REASON})
    kept = set() if plan is None else set(plan.layers)
    for key, slot in slots.items():
        if layer_of(slot) not in kept or not key.endswith(WEIGHT):
            parameter = tensor_of(model, slot.parameter)
            write(slot, parameter, source.read(key, dtype_of(parameter)))
    _start_casts(model, source, slots, from_files=weights == TRAINING)
    if plan is not None:
        hide_from_ddp(model)
        plan.finish(model)
    _forget_quantization(model)
    return model


def _forget_quantization(model: nn.Module) -> None:
    """Drop ``quantization_config`` from a config that was read from the files.

    Transformers' ``save_pretrained`` would write it beside weights that are not stored so. Its
    ``from_pretrained`` drops it too where it dequantises.
    """
    found: Any = getattr(model, "config", None)
    if hasattr(found, "to_json_string") and "quantization_config" in vars(found):
        del found.quantization_config


def _check_arguments(model: Any, path: Any, weights: Any, config: Any, ignore: Any) -> None:
    check_module(model, "load")
    check_type(path, (str, Path), "load", "path", "a folder or a .safetensors file")
    if weights not in MODES:
        raise ValueError(
            f"load: weights must be one of {', '.join(map(repr, MODES))}, got {described(weights)}"
        )
    if config is not None:
        check_config(config, "load")
        if weights != TRAINING:
            raise ValueError(
                f'load: config is for weights="{TRAINING}", which converts the model; with '
                f'weights="{weights}" leave it out'
            )
    is_list = isinstance(ignore, (list, tuple)) and all(isinstance(x, str) for x in ignore)
    if not is_list:
        raise TypeError(
            f'load: ignore must be a list of patterns, as ["*.k_scale"], got {ignore!r}'
        )


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f'load: device must be a torch.device or its name, as "cuda", got {described(device)}'
        ) from error


def _check_model(model: nn.Module, weights: str, config: object) -> None:
    layers = {fqn: m for fqn, m in model.named_modules() if own_config(m) is not None}
    resident = [
        f for f, m in layers.items() if isinstance(m, Float8Linear) and is_resident(m.weight)
    ]
    if resident:
        raise ValueError(
            f"load: the weight of {named(resident[0])} is in float8 alone; load into a plain "
            "model, as convert_from_float8_training(model) returns"
        )
    if layers and (weights == FLOAT8 or config is not None):
        what = f'weights="{FLOAT8}"' if weights == FLOAT8 else "config="
        raise ValueError(
            f"load: {named(next(iter(layers)))} is converted already, and {what} converts plain "
            "models: call convert_from_float8_training(model) first"
            + ("" if weights == FLOAT8 else ", or leave config out")
        )
    if weights == TRAINING and not layers and config is None:
        raise ValueError(
            f'load: weights="{TRAINING}" needs a converted model, or config=: '
            'Float8LinearConfig.from_recipe_name("blockwise")'
        )


def _check_layers(plan: ConversionPlan, source: Source, weights: str) -> None:
    """Raise if no layer would be in float8, which the caller has asked for."""
    if plan.layers:
        return
    why = f"no layer of the model can be converted:{plan.reasons}"
    if not source.layers:
        why = "the checkpoint has no weight in float8"
    raise ValueError(
        f'nothing was loaded from {source.path}: weights="{weights}", and {why}\n'
        f'weights="{HIGH_PRECISION}" loads it into any model'
    )


def _tie_on_meta(model: nn.Module) -> None:
    """Share tied weights of a model of Transformers again, which accelerate's empty models lose."""
    tie = getattr(model, "tie_weights", None)
    if callable(tie) and any(p.is_meta and not is_sharded(p) for p in model.parameters()):
        tie()


def _in_float8(model: nn.Module, source: Source, slots: Mapping[str, Slot]) -> set[str]:
    """The modules whose weights the files have in float8, and layers that share such a weight."""
    found = [slots[key] for name in source.layers if (key := name + WEIGHT) in slots]
    names = {layer_of(slot) for slot in found}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    weights = {id(linears[n].weight) for n in names if n in linears}
    return names | {n for n, linear in linears.items() if id(linear.weight) in weights}


# --- the first scales


def _start_casts(
    model: nn.Module, source: Source, slots: Mapping[str, Slot], from_files: bool
) -> None:
    """Start the histories of delayed casts anew; from the scales of the files where they apply."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Float8Linear)}
    for linear in layers.values():
        for cast in linear.casts:
            if isinstance(cast, DelayedCast):
                cast.start_beside(linear.weight)
    for name in source.layers if from_files else ():
        slot = slots.get(name + WEIGHT)
        if slot is None or slot.index or layer_of(slot) not in layers:
            continue
        stored, layer = source.layer(name, torch.float32), layers[layer_of(slot)]
        x, w, _ = layer.casts
        if isinstance(w, DelayedCast) and stored.weight.scale.numel() == 1:
            w.start_from(stored.weight.scale)
        if layer.config.smooth_input:  # it casts the input times factors
            continue
        if isinstance(x, DelayedCast) and stored.input_scale is not None:
            x.start_from(stored.input_scale)
