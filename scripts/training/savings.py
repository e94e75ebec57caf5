"""Which parts of a training, besides GEMMs, are in float8: optimizer states, activations, weights.

A run is written as its recipe and what it saves, joined by "+":

    bf16                                        the baseline: AdamW with float32 states
    bf16+float8_adamw                           both moments in float8, 2.1 bytes instead of 8
    tensorwise+saved_activations+float8_adamw   all that does not change the weights
    tensorwise+O3                               MS-AMP's level (float8.ms_amp), weights included

The parts are names of `OPTIMIZERS`, `SAVED` and names of `LEVELS`. A level chooses the optimizer's
storage itself, so it excludes the float8 optimizers; u-muP's AdamW (recipes "unit", "unit_bf16")
has float32 states.
"""

from __future__ import annotations

from typing import Any

import torch

from float8.optim import AdamW
from float8.unit_scaling import optim as unit_optim
from scripts.training import gpt

SAVED = "saved_activations"
LEVELS = ("O1", "O2", "O3")
# optimizer -> how its second moment is kept (the first: float8); the baseline has both in float32
OPTIMIZERS = {"adamw": "float32", "float8_adamw": "float8", "float8_adamw_v16": "float16"}


def parts_of(run: str) -> dict[str, Any]:
    """The options of a run: recipe, optimizer, saved_activations, ms_amp.

    Raises:
        ValueError: an unknown part, or two of a kind.
    """
    recipe, *parts = run.split("+")
    kinds = {**dict.fromkeys(OPTIMIZERS, "optimizer"), **dict.fromkeys(LEVELS, "ms_amp")}
    kinds[SAVED] = SAVED
    options: dict[str, Any] = {"recipe": recipe}
    for part in parts:
        if part not in kinds:
            known = ", ".join((*OPTIMIZERS, SAVED, *LEVELS))
            raise ValueError(f"{run}: nothing is called {part!r}; after the recipe come {known}")
        if (name := kinds[part]) in options:
            raise ValueError(f"{run}: {part} is a second {name.replace('_', '-')}; name one")
        options[name] = True if part == SAVED else part
    return options


def name_of(recipe: str, optimizer: str, saved_activations: bool, ms_amp: str | None) -> str:
    """The inverse of `parts_of`."""
    parts = [recipe]
    parts += [SAVED] * saved_activations
    parts += [optimizer] * (optimizer != "adamw")
    parts += [ms_amp] if ms_amp is not None else []
    return "+".join(parts)


def check(recipe: str, optimizer: str, ms_amp: str | None, processes: int) -> None:
    """Refuse combinations of which a part would be ignored.

    Raises:
        ValueError: naming what to leave out.
    """
    own = recipe in gpt.UNIT and (optimizer != "adamw" or ms_amp is not None)
    for is_wrong, reason in (
        (own, f"recipe {recipe} has u-muP's AdamW: leave out --optimizer and --ms-amp"),
        (ms_amp and optimizer != "adamw", "--ms-amp has its own optimizer: leave out --optimizer"),
        (ms_amp and recipe == "bf16", "--ms-amp multiplies in float8: take --recipe tensorwise"),
        (ms_amp and processes > 1, "--ms-amp trains in one process: leave out --nproc"),
    ):
        if is_wrong:
            raise ValueError(reason)


def adamw(
    name: str, groups: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """The optimizer of that name, or u-muP's ("unit"), over the groups."""
    if name == "adamw":
        return torch.optim.AdamW(groups, learning_rate, betas=betas, fused=True)
    if name == "unit":
        return unit_optim.AdamW(groups, learning_rate, betas=betas, fused=True)
    return AdamW(groups, learning_rate, betas=betas, second_moment=OPTIMIZERS[name])
