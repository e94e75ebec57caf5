"""The names and shapes under which a model's parameters are published.

Transformers (5.x) keeps models in memory in another form than in files. The experts of a layer are
one stack, and the projections that read the same input one matrix of it; files have one matrix for
each expert and projection, often under other names::

    model.layers.0.mlp.experts.gate_up_proj  (E, 2 I, H)   in memory
    model.layers.0.block_sparse_moe.experts.3.w1.weight  (I, H) = gate_up_proj[3, :I]   in files
    model.layers.0.block_sparse_moe.experts.3.w3.weight  (I, H) = gate_up_proj[3, I:]

`published` says where each tensor of a file lies inside the model: one table for saving, which
reads these parts, and for loading, which writes them. The rules are Transformers' own, hundreds of
them, so none is written here. The table is read off a run of its ``revert_weight_conversion``, by
which ``save_pretrained`` converts, on tensors without data (tested with Transformers 5.23). A
tensor that it returns is a view of a parameter, whose offset and strides say which part. Strides
are chosen so that no two dimensions share one. A result that is no view, such as rows permuted for
rotary embeddings, has no place inside a parameter, and is refused by its name.

Transformers' rules ask for the classes of modules. So the run takes a copy of the tree of modules
(parameters are shared) in which wrappers, the classes that FSDP2 makes, and those of this library
are the plain ones again, which also gives the names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from float8.linear.delayed import DelayedCast
from float8.linear.layer import with_state_of

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Slot:
    """The place of a published tensor inside a model.

    ``parameter`` is the name of a parameter or buffer. ``index`` selects the part of it, an integer
    or slice per dimension; () is all of it. ``transposed`` says that the published tensor has the
    last two dimensions of the part swapped. ``shape`` is that of the published tensor.
    """

    parameter: str
    index: Index
    transposed: bool
    shape: torch.Size

    def of(self, parameter: Tensor) -> Tensor:
        """The published tensor as a view of the parameter, to be read or written to."""
        part = parameter[self.index]
        return part.mT if self.transposed else part


def published(model: nn.Module) -> dict[str, Slot]:
    """Where each tensor of a published checkpoint lies inside a model, by key.

    The model is plain or converted; it may be compiled, sharded by FSDP2, in a wrapper, or on the
    meta device. The keys are those that the plain model's ``save_pretrained`` writes, in the order
    of the model's parameters and of the parts inside each. Shared parameters have one key, and
    buffers of this library's layers, such as histories of amaxes, none. A model that is not
    Transformers' has its own names. Raises ValueError if a published tensor is no part of one
    parameter, or if a wrapper hides parameters.
    """
    plain, names = _plain(model, "", "")
    kept = _kept(plain)
    slots: list[tuple[str, Slot]] = []
    rest = dict(kept)
    for prefix, pretrained in _pretrained(plain):
        own = {name: x for name, x in rest.items() if name.startswith(prefix)}
        rest = {name: x for name, x in rest.items() if name not in own}
        slots += _reverted(pretrained, prefix, own)
    slots += [(name, Slot(name, (), False, x.shape)) for name, x in rest.items()]
    order = {name: position for position, name in enumerate(kept)}
    slots.sort(key=lambda item: order[item[1].parameter])  # stable: parts keep their order
    return {key: Slot(names[s.parameter], s.index, s.transposed, s.shape) for key, s in slots}


# --- the plain model


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


def _plain(module: nn.Module, name: str, plain_name: str) -> tuple[nn.Module, dict[str, str]]:
    """The module without wrappers, of plain types, and (plain name -> name) of its tensors."""
    if (reason := _refuses(type(module))) is not None:
        raise ValueError(f"{name.rstrip('.') or 'the model'} {reason}")
    inside = inside_of(module)
    if inside is not None:
        return _plain(module.get_submodule(inside), f"{name}{inside}.", plain_name)
    own: Any = with_state_of(module, _plain_type(module))
    names = {plain_name + n: name + n for n in (*module._parameters, *module._buffers)}
    own._modules.clear()
    for child_name, child in module._modules.items():
        if child is None or isinstance(child, DelayedCast):
            continue
        plain, inner_names = _plain(child, f"{name}{child_name}.", f"{plain_name}{child_name}.")
        own._modules[child_name] = plain
        names |= inner_names
    return own, names


def _refuses(kind: type[nn.Module]) -> str | None:
    """The reason why the parameters of modules of a type are not those that are published."""
    if kind.__name__ == "FullyShardedDataParallel":
        return "is wrapped by FullyShardedDataParallel, which flattens parameters: use fully_shard"
    if kind.__module__.partition(".")[0] == "peft":
        return "has adapters, which published layers do not have: merge them (merge_and_unload())"
    return None


def _plain_type(module: nn.Module) -> type[nn.Module]:
    kind = type(module)
    while any(base.__name__ == "FSDPModule" for base in kind.__bases__):  # made by fully_shard
        kind = next(base for base in kind.__bases__ if base.__name__ != "FSDPModule")
    return getattr(module, "plain_type", kind)


def _kept(plain: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint holds, each once."""
    found: dict[str, Tensor] = {}
    droppable: list[str] = []
    ignored: list[str] = []
    for name, module in plain.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        buffers = {
            n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set
        }
        own = {**module._parameters, **buffers}
        found |= {prefix + n: x for n, x in own.items() if x is not None}
        droppable += [prefix + n for n in getattr(module, "_tied_weights_keys", None) or ()]
        ignored += [prefix + n for n in getattr(module, "_keys_to_ignore_on_save", None) or ()]
    by_tensor: dict[int, list[str]] = {}
    for name, x in found.items():
        if name not in ignored:
            by_tensor.setdefault(id(x), []).append(name)
    # Transformers says which names of a shared weight it expects in files; else the first.
    kept = set()
    for group in by_tensor.values():
        main = [n for n in group if not any(re.search(key, n) for key in droppable)]
        kept.add((main or sorted(group)[-1:])[0])
    return {name: x for name, x in found.items() if name in kept}


def _pretrained(plain: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(prefix, module) of the outermost modules that are models of Transformers."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")  # without it there is none
    if modeling is None:
        return
    if isinstance(plain, modeling.PreTrainedModel):
        yield prefix, plain
        return
    for name, child in plain.named_children():
        yield from _pretrained(child, f"{prefix}{name}.")


# --- the run of Transformers' conversion


class _NoCopies(TorchFunctionMode):
    """Lets a view stay one: a conversion makes each part contiguous, which would copy it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _reverted(model: Any, prefix: str, own: dict[str, Tensor]) -> list[tuple[str, Slot]]:
    """(key, slot) of a model of Transformers, whose parameters are ``own`` under a prefix."""
    from transformers.core_model_loading import revert_weight_conversion  # >= 5

    roots = {name: _without_data(x.shape) for name, x in own.items()}
    name_of = {x.untyped_storage()._cdata: name for name, x in roots.items()}
    with _NoCopies():
        found = revert_weight_conversion(
            model, {n.removeprefix(prefix): x for n, x in roots.items()}
        )
    slots = []
    for key, part in found.items():
        name = name_of.get(part.untyped_storage()._cdata)
        if name is None:
            raise ValueError(
                f"{prefix}{key}: Transformers computes it from the parameters of "
                f"{type(model).__name__} (rows permuted, or several parameters joined), so it is "
                "no part of one of them. Such models are not supported; leave their module out by "
                "passing the part of the model that is, such as model.language_model"
            )
        slots.append((prefix + key, _slot(prefix + key, name, roots[name], part)))
    _check_cover(slots, own)
    slots.sort(key=lambda item: _start(item[1]))
    return slots


def _without_data(shape: torch.Size) -> Tensor:
    """A meta tensor whose dimensions have strides of their own, those of size 1 too."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * (size + 2))
    return torch.empty_strided(shape, strides[: len(shape)], device="meta")


def _slot(key: str, name: str, root: Tensor, part: Tensor) -> Slot:
    if part.shape == root.shape and part.stride() == root.stride():
        return Slot(name, (), False, part.shape)
    offset, strides = part.storage_offset(), root.stride()
    index: list[Any] = []
    for stride in strides:
        index.append(offset // stride)
        offset %= stride
    dims = [strides.index(stride) if stride in strides else -1 for stride in part.stride()]
    sizes = dict(zip(dims, part.shape, strict=True))
    transposed = len(dims) > 1 and dims[-2] > dims[-1]
    if transposed:
        dims[-2:] = dims[-1], dims[-2]
    if dims != sorted({*dims} - {-1}):
        raise ValueError(
            f"{key}: Transformers rearranges {name} {tuple(root.shape)} to {tuple(part.shape)}; it "
            "has to be a part of it, at most with the last two dimensions swapped"
        )
    index = [slice(i, i + sizes[dim]) if dim in sizes else i for dim, i in enumerate(index)]
    return Slot(name, tuple(index), transposed, part.shape)


def _start(slot: Slot) -> tuple[int, ...]:
    return tuple(i.start if isinstance(i, slice) else i for i in slot.index)


def _check_cover(slots: list[tuple[str, Slot]], own: dict[str, Tensor]) -> None:
    """Raise unless the parts of each parameter have as many elements as it has."""
    counts = dict.fromkeys(own, 0)
    for _, slot in slots:
        counts[slot.parameter] += slot.shape.numel()
    for name, count in counts.items():
        if count != own[name].numel():
            raise ValueError(
                f"{name}: {own[name].numel()} elements, of which Transformers would write {count} "
                "into a checkpoint; its conversion of this model is not supported"
            )
