"""Which layers a prediction is about: those of a model, or a list of shapes.

A model's layers are what conversion would take: modules whose type is exactly ``nn.Linear`` or was
registered, and `Float8Linear`s, each once, however many names it has. Only sizes, dtypes and
``requires_grad`` are read, so that a model on the meta device, of any size, will do.

Every layer is taken to see the same number of tokens, in one call per batch. Where that is not so
(experts that share the tokens, a layer called twice), give shapes instead of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from float8.config import Float8LinearConfig
from float8.estimate.casts import LARGEST, Use, is_count
from float8.estimate.devices import Device
from float8.estimate.roofline import Shape, kinds_of_plan
from float8.kernels.cublas import ALIGNMENT
from float8.linear.layer import Float8Linear
from float8.linear.refusals import refuses_call, refuses_layer
from float8.linear.registration import MODULE_RULES

Shapes = Iterable[Shape | Sequence[int]]


@dataclass(frozen=True)
class Layer:
    """One layer and its batch; ``dtype`` and ``trains`` are those of its weight."""

    name: str
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    trains: bool = True


def layers_of(model_or_shapes: nn.Module | Shapes, tokens: int | None) -> list[Layer]:
    """The layers of a model for a batch of ``tokens``, or one layer per (M, K, N).

    Raises:
        TypeError: neither a module nor shapes.
        ValueError: nothing to predict, ``tokens`` missing, or given beside shapes.
    """
    if isinstance(model_or_shapes, (str, type)) or not isinstance(
        model_or_shapes, (nn.Module, Iterable)
    ):
        raise TypeError(
            f"model={model_or_shapes!r} must be a module, such as nn.Linear(64, 64) (an instance, "
            "not its class or name), or a list of shapes (M, K, N)"
        )
    if isinstance(model_or_shapes, nn.Module):
        return _of_model(model_or_shapes, check_tokens(tokens))
    if tokens is not None:
        raise ValueError(f"tokens={tokens} beside shapes: a shape's M is its tokens; leave it None")
    shapes = [s if isinstance(s, Shape) else _shape(s) for s in model_or_shapes]
    if not shapes:
        raise ValueError("no shapes given; one is (M, K, N): tokens, in_features, out_features")
    return [Layer("", shape) for shape in shapes]


def check_tokens(tokens: int | None) -> int:
    """``tokens``, or an error that says what it should be."""
    if tokens is None or not is_count(tokens):
        raise ValueError(
            f"tokens={tokens!r} must be an integer >= 1: rows of a layer's input in one forward, "
            f"such as batch size * sequence length, at most {LARGEST}"
        )
    return tokens


def _shape(sizes: Sequence[int]) -> Shape:
    if not isinstance(sizes, Sequence) or len(sizes) != 3:
        raise ValueError(
            f"a shape is (M, K, N): tokens, in_features, out_features; got {sizes!r} in the list "
            "of shapes"
        )
    return Shape(*sizes)


def layer_of(module: nn.Module, name: str, tokens: int) -> Layer:
    """A module with ``in_features``, ``out_features`` and ``weight`` as a Layer."""
    weight = module.weight
    K, N = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    return Layer(name, Shape(tokens, K, N), weight.dtype, weight.requires_grad)  # type: ignore[arg-type]


def _of_model(model: nn.Module, tokens: int) -> list[Layer]:
    layers = [
        layer_of(module, name or type(module).__name__, tokens)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (type(module) in MODULE_RULES or isinstance(module, Float8Linear))
        and 0 not in (module.in_features, module.out_features)
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear: there is nothing that float8 would convert"
        )
    return layers


def refuses(layer: Layer, config: Float8LinearConfig, device: Device, use: Use) -> str | None:
    """The reason why a device would not run a layer with this config, or None.

    The library's own checks answer, so that a prediction refuses what training would refuse.
    """
    M, K, N = layer.shape.M, layer.shape.K, layer.shape.N
    weight = torch.empty(N, K, dtype=layer.dtype, device="meta", requires_grad=use.weight_trains)
    reason = refuses_layer(weight, config)
    if reason is None and not device.emulates:
        if config.emulate:
            return f"emulate=True is plain PyTorch, of which {device.name} has no model; unset it"
        # float32 parameters: as under autocast to bfloat16, which is what times are of.
        dtype = torch.bfloat16 if layer.dtype == torch.float32 else layer.dtype
        reason = refuses_call(config, weight, M, dtype, device.arch, use.training)
    return reason or _lacks_figures(config, device, use)


def _lacks_figures(config: Float8LinearConfig, device: Device, use: Use) -> str | None:
    missing = set(kinds_of_plan(config.plan, use).values()) - set(device.products)
    if not missing:
        return None
    return f"{device.name} has no figures for {' and '.join(sorted(missing))} products"


def padded(shape: Shape, config: Float8LinearConfig, device: Device) -> Shape:
    """The shape that runs: ``pad_inner_dim`` rounds sizes up to multiples of 16 on GPUs."""
    if device.emulates or not config.pad_inner_dim:
        return shape
    return Shape(*(-(-size // ALIGNMENT) * ALIGNMENT for size in (shape.M, shape.K, shape.N)))
