"""The options of every optimizer of this package, and the checks of values.

A check is here if the mistake would train to wrong numbers without an error of PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES
from float8.tensor import Float8Tensor


@dataclass
class Options:
    """The options that every optimizer takes; all of them belong to the parameter group.

    Attributes:
        maximize: step up the gradient, as under this name in torch.optim.
        capturable: keep ``step`` on the parameter's device, for CUDA graphs.
        fused: True asks for the CUDA kernel, False for plain PyTorch. None takes the kernel where
            it runs: on CUDA for every option but a ``group_size`` that is no power of two or is
            above 2048. It warns once on a GPU or of an option that the kernel does not take.
        first_moment: "float8" or "float32".
        second_moment: "float8" (with expanded range), "float16" (with a scale) or "float32".
        group_size: how many consecutive elements of a row share a scale.
        min_size: parameters with fewer elements keep float32 moments.
        stochastic_rounding: round bfloat16 and float16 parameters stochastically, so that small
            updates are not lost; the same numbers in every run.
        state_rounding: of float8 moments: "nearest", "stochastic", or "auto", which rounds
            stochastically a moment whose decay is so near to 1 that a step changes it by less than
            the distance of two float8 values, as AdamW's second moment.
    """

    maximize: bool = False
    capturable: bool = False
    fused: bool | None = None
    first_moment: str = "float8"
    second_moment: str = "float8"
    group_size: int = 128
    min_size: int = 4096
    stochastic_rounding: bool = False
    state_rounding: str = "auto"


# The option of a moment -> its values -> the kind of `Moment`, or None for float32.
KINDS: dict[str, dict[str, str | None]] = {
    "first_moment": {"float8": "float8", "float32": None},
    "second_moment": {"float8": "float8_expanded", "float16": "float16", "float32": None},
}
# Which states there are and how they are kept: this optimizer's choice, not a checkpoint's.
STORAGE = (
    *(*KINDS, "group_size", "min_size", "stochastic_rounding", "state_rounding"),
    *("kind", "slice_rows"),
)

_CHOICES = {
    **KINDS,
    "state_rounding": ("auto", "nearest", "stochastic"),
    "amsgrad": (False,),
    "kind": ("muon", "adamw"),
    "adjust_lr_fn": (None, "original", "match_rms_adamw"),
}
# Numbers in [low, high).
_RANGES = dict.fromkeys(("lr", "weight_decay", "eps", "momentum", "min_size"), (0.0, math.inf))
_RANGES |= {"betas": (0.0, 1.0), "group_size": (1, math.inf)}


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for hyperparameters and options out of range."""
    for name, known in _CHOICES.items():
        if name in group and group[name] not in known:
            choices = ", ".join(map(str, known))
            raise ValueError(f"{name} must be one of {choices}, got {group[name]!r}")
    for name, (low, high) in _RANGES.items():
        value = group.get(name, low)
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, Tensor) and number.device.type != "cpu":
                continue  # reading it would synchronise the device
            if not low <= number < high:
                raise ValueError(f"{name} must be in [{low:g}, {high:g}), got {value}")
    if group.get("nesterov") and group.get("dampening", 0) != 0:
        raise ValueError(f"nesterov needs dampening=0, got {group['dampening']}")


def describe(index: int, p: Tensor, group: Mapping[str, Any]) -> str:
    """The name of a parameter for error messages, or its place in the group."""
    names = group.get("param_names")
    name = f"parameter {index}" if names is None else f"parameter {names[index]!r}"
    return f"{name} of shape {tuple(p.shape)} and dtype {p.dtype}"


def check_dtype(x: Tensor, what: str) -> None:
    """Raise TypeError for a parameter or a gradient that steps in float32 would round."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{what} is {x.dtype}, and steps are computed in float32: keep the model in float32, "
            "bfloat16 or float16 (model.float()), or use torch.optim"
        )


def check_parameter(p: Tensor, what: str) -> None:
    """Raise TypeError for a parameter that the optimizers cannot train."""
    check_dtype(p, what)
    if isinstance(p, Float8Tensor) and (p.scale.numel() != 1 or p.data_t is not None):
        raise TypeError(
            f"{what} is a Float8Tensor with block {p.block}: a parameter in float8 needs one scale "
            "(granularity=Tensorwise()) and no transposed copy, which a step would leave stale"
        )
