"""Which layers of a model are in float8 in a checkpoint, and why the others are not.

A layer that is in float8 in the model is so in the file. It stays in high precision if another
module reads its weight, as an embedding that is tied to the head; if its config multiplies the
weight in high precision; or if files do not have the weight as a matrix ``NAME.weight``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from float8.checkpoints.stacks import Slot, inside_of
from float8.convert.conversion import own_config
from float8.linear.layer import Float8Linear
from float8.linear.registration import stacked_weights


class ModelLayers:
    """The modules of a model, perhaps in wrappers, by the tensors that they own.

    Attributes:
        tensors: name -> parameter or buffer, under each of its names.
        names: the modules' names in the model, by id, without those of wrappers; shared modules
            have several.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[int, list[str]] = defaultdict(list)
        self._modules: dict[str, tuple[nn.Module, str]] = {}
        # id of a tensor -> id of each module that has it -> (name of the module, module, own name)
        self._owners: dict[int, dict[int, tuple[str, nn.Module, str]]] = defaultdict(dict)
        self._linears: dict[str, nn.Linear] = {}
        self._reasons: dict[int, str] = {}
        for name, plain, module in _walk(model, "", ""):
            is_first = id(module) not in self.names
            self.names[id(module)].append(plain)
            prefix = f"{name}." if name else ""
            for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self.tensors[prefix + own] = tensor
                    self._modules[prefix + own] = module, own
                    self._owners[id(tensor)].setdefault(id(module), (plain, module, own))
            if isinstance(module, nn.Linear) and is_first:
                self._linears[plain] = module
        for module in model.modules():
            self._take_report(module)

    def _take_report(self, module: nn.Module) -> None:
        """Remember why a conversion has left layers alone, by the modules' ids."""
        report = module.__dict__.get("float8_conversion")
        for name, reason in (report.skipped if report is not None else {}).items():
            try:
                self._reasons[id(module.get_submodule(name))] = reason
            except AttributeError:  # the model has changed since
                continue

    def layer_of(self, key: str, slot: Slot) -> tuple[nn.Module | None, str | None]:
        """The module that multiplies by a tensor in float8, or the reason why none does.

        Returns (module, None); (None, reason) for the weight of a linear layer in high precision;
        and (None, None) for all other tensors. ``key`` is the tensor's name in the file.
        """
        module, own = self._modules[slot.parameter]
        if not _multiplies_in_float8(module, own):
            return None, self._why_not(module, key, slot)
        for name, other, its in self._owners[id(self.tensors[slot.parameter])].values():
            if not _multiplies_in_float8(other, its):
                return None, (
                    f"its weight is also {name}.{its} ({type(other).__name__}), which "
                    "reads it in high precision"
                )
        config = own_config(module)
        assert config is not None
        if config.plan.output.b is None:
            return None, "its config multiplies the weight in high precision"
        if not key.endswith(".weight") or len(slot.shape) != 2:
            return None, (
                f"files have its weight as {key} of shape {tuple(slot.shape)}, and float8 layouts "
                "store matrices called NAME.weight"
            )
        return module, None

    def _why_not(self, module: nn.Module, key: str, slot: Slot) -> str | None:
        """The reason why a linear layer stays; None for what is no linear layer."""
        is_matrix = key.endswith(".weight") and len(slot.shape) == 2
        if isinstance(module, nn.Embedding) or not is_matrix:
            return None
        return self._reasons.get(id(module), f"it is a {_kind(module)} that was not converted")

    def unpublished(self, published: set[str]) -> dict[str, str]:
        """Name -> reason, of the linear layers that have no weight of their own in the file.

        ``published`` has the names of the layers that have one.
        """
        found = {}
        for name, layer in self._linears.items():
            if name not in published and (weight := layer._parameters.get("weight")) is not None:
                others = [n for n, m, _ in self._owners[id(weight)].values() if m is not layer]
                if others:
                    found[name] = f"its weight is that of {others[0]}"
        return found


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # which fully_shard adds


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


def _walk(module: nn.Module, name: str, plain: str) -> Iterator[tuple[str, str, nn.Module]]:
    """(name, name without those of wrappers, module) of all modules, shared ones several times."""
    inside = inside_of(module)
    if inside is None:  # a wrapper shares its name with what it wraps
        yield name, plain, module
    for own, child in module._modules.items():
        if child is not None:
            further = plain if own == inside else f"{plain}.{own}".removeprefix(".")
            yield from _walk(child, f"{name}.{own}".removeprefix("."), further)
