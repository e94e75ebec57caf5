"""Which tensors of a checkpoint go where in a model; all that does not fit is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from float8.checkpoints.source import Source, told
from float8.checkpoints.stacks import Slot, published
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels import is_sharded


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a name, as `Slot` has it."""
    prefix, _, last = name.rpartition(".")
    module = model.get_submodule(prefix)
    found = module._parameters.get(last, module._buffers.get(last))
    assert found is not None, name
    return found


def join(fqn: str, name: str) -> str:
    """The name of a parameter of a module, which may be the model itself."""
    return f"{fqn}.{name}" if fqn else name


def layer_of(slot: Slot) -> str:
    """The name of the module that has the parameter of a slot."""
    return slot.parameter.rpartition(".")[0]


def dtype_of(parameter: Tensor) -> torch.dtype:
    """The dtype to which a float8 weight dequantises on its way to a parameter."""
    return parameter.dtype if parameter.dtype in HIGH_PRECISION_DTYPES else torch.float32


def matched(model: nn.Module, source: Source, ignore: Sequence[str]) -> dict[str, Slot]:
    """The place in the model of each tensor of the files that is loaded.

    A weight that modules share may be in the files under any of its names. ``ignore`` has patterns
    of keys to leave out, besides those that a model of Transformers leaves out. Raises ValueError
    if keys are missing or unexpected, or if shapes or dtypes differ.
    """
    slots, specs = published(model), source.weights()
    places = _with_other_names(model, slots, specs)
    found: dict[str, Slot] = {}
    problems: list[str] = []
    filled: dict[str, str] = {}  # key of the model -> that of the files
    for key, spec in specs.items():
        if _any_matches(ignore, key):
            continue
        if key not in places:
            if not _leaves_out(model, "_keys_to_ignore_on_load_unexpected", key):
                problems.append(f"{source.place(key)} is not in the model")
            continue
        own = places[key]
        slot = slots[own]
        reason = _misfit(spec.dtype, spec.shape, tensor_of(model, slot.parameter), slot)
        if reason is None and own in filled:
            reason = _differs(source, filled[own], key)
        if reason is not None:
            problems.append(f"{source.place(key)} {reason}")
        elif own not in filled:
            filled[own], found[key] = key, slot
    problems += _missing(model, [key for key in slots if key not in filled], ignore, specs)
    problems += _without_memory(model, slots, set(filled))
    if problems:
        raise ValueError(
            told(
                f"nothing was loaded from {source.path}, because it does not fit the model",
                problems,
            )
            + "\nignore=[...] leaves keys out, by name or pattern"
        )
    return found


def _any_matches(patterns: Sequence[str], key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _leaves_out(model: nn.Module, attribute: str, key: str) -> bool:
    """Whether a model of Transformers lists a key as one to leave out."""
    listed = [p for m in model.modules() for p in getattr(m, attribute, None) or ()]
    return any(re.search(pattern, key) for pattern in listed)


def _with_other_names(
    model: nn.Module, slots: Mapping[str, Slot], specs: Mapping[str, object]
) -> dict[str, str]:
    """Key of the files -> key of the model, also under the other names of shared tensors."""
    places = {key: key for key in slots}
    by_tensor = {
        id(tensor_of(model, slot.parameter)): key for key, slot in slots.items() if not slot.index
    }
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        if name in specs and name not in places and id(tensor) in by_tensor:
            places[name] = by_tensor[id(tensor)]
    return places


def _misfit(
    dtype: torch.dtype, shape: tuple[int, ...], parameter: Tensor, slot: Slot
) -> str | None:
    """The reason why a tensor of the files cannot go to a slot, or None."""
    if tuple(shape) != tuple(slot.shape):
        return f"has shape {tuple(shape)}, and the model's is {tuple(slot.shape)}"
    if dtype.is_floating_point != parameter.dtype.is_floating_point:
        return f"is {dtype}, and the model's is {parameter.dtype}"
    return None


def _differs(source: Source, first: str, second: str) -> str | None:
    """The reason why two names of one tensor cannot both be right, or None."""
    a, b = source.read(first, torch.float32), source.read(second, torch.float32)
    if type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b):
        return None
    return f"differs from {first}, and the model has one tensor for both; ignore one, or untie them"


def _missing(
    model: nn.Module, keys: Sequence[str], ignore: Sequence[str], specs: Mapping[str, object]
) -> Iterator[str]:
    for key in keys:
        is_left = _leaves_out(model, "_keys_to_ignore_on_load_missing", key)
        if key not in specs and not is_left and not _any_matches(ignore, key):
            yield f"{key} of the model is missing"


def _without_memory(model: nn.Module, slots: Mapping[str, Slot], filled: set[str]) -> Iterator[str]:
    """Tensors on the meta device that loading would leave without values."""
    for key, slot in slots.items():
        tensor = tensor_of(model, slot.parameter)
        if tensor.is_meta and is_sharded(tensor):
            yield f"{key} is sharded on the meta device: call model.to_empty(device=...) first"
        elif tensor.is_meta and key not in filled:
            yield f"{key} is on the meta device and gets no values: initialise it before"
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                yield (
                    f"{prefix}.{name}".lstrip(".") + " is a buffer on the meta device that no "
                    "checkpoint holds: make the model under accelerate.init_empty_weights(), which "
                    "leaves buffers, or compute it before"
                )
