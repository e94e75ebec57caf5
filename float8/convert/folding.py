"""Names of layers in reports: those that differ in numbers only share a line, with their count.

Wrappers, as those of torch.compile and DDP, add parts to names.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def named(fqn: str) -> str:
    """A module's name, for messages."""
    return fqn or "the module itself"


def pattern_of(name: str) -> str:
    """A name with a star for each number: ``layers.*.mlp.gate``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def folded(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason and pattern of names: ``layers.*.mlp.gate (48 layers): the reason``.

    ``reasons`` are pairs of a layer's name and its reason. Names that are numbers alone, those of
    an ``nn.Sequential``, keep a line each.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons:
        pattern = pattern_of(name)
        groups.setdefault((pattern if pattern.strip("*.") else name, reason), []).append(name)
    return [
        f"{named(names[0])}: {reason}"
        if len(names) == 1
        else f"{pattern} ({len(names)} layers): {reason}"
        for (pattern, reason), names in groups.items()
    ]


# Wrapper -> the attribute that is the wrapped module.
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "_FabricModule": "_forward_module",
}


def inside_of(module: nn.Module) -> str | None:
    """The name under which a wrapper has the wrapped module; None for other modules."""
    return WRAPPERS.get(type(module).__name__.removeprefix("FSDP"))  # which fully_shard adds


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers, as those of DistributedDataParallel and torch.compile."""
    while (inside := inside_of(model)) is not None:
        model = model.get_submodule(inside)
    return model
