"""The names and shapes under which a model's parameters are published.

Transformers (5.x) keeps models in memory in another form than in files. The experts of a layer are
one stack, and the projections that read the same input one matrix of it; files have one matrix for
each expert and projection, often under other names::

    model.layers.0.mlp.experts.gate_up_proj  (E, 2 I, H)   in memory
    model.layers.0.block_sparse_moe.experts.3.w1.weight  (I, H) = gate_up_proj[3, :I]   in files
    model.layers.0.block_sparse_moe.experts.3.w3.weight  (I, H) = gate_up_proj[3, I:]

`published` says where each tensor of a file lies inside the model: one table for saving, which
reads these parts, and for loading, which writes them. The rules are Transformers' own, hundreds of
them, so one alone is written here: that of Llama 4's experts, which it has as code. The table is
read off a run of its ``revert_weight_conversion``, by which ``save_pretrained`` converts, on
tensors without data (tested with Transformers 5.23). A tensor that it returns is a view of a
parameter, whose offset and strides say which part. Strides are chosen so that no two dimensions
share one. A result that is no view, such as rows permuted for rotary embeddings, has no place
inside a parameter, and is refused by its name.

Transformers' rules ask for the classes of modules. So the run takes a copy of the tree of modules
(parameters are shared) in which wrappers, the classes that FSDP2 makes, and those of this library
are the plain ones again, which also gives the names.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from float8.checkpoints.layouts import COMPRESSED_TENSORS
from float8.convert.folding import inside_of
from float8.granularity import WHOLE, Block, ceil_div
from float8.linear.casts import DelayedCast
from float8.linear.module import with_state_of

Index = tuple[int | slice, ...]
Owners = dict[int, list[tuple[str, nn.Module, str]]]


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

    def cuts(self, shape: torch.Size, block: Block) -> bool:
        """Whether it has a part of a block (rows, columns) of a parameter of this shape."""
        ends = [(i, n) for i, n in zip(self.index, shape, strict=False) if isinstance(i, slice)]
        blocks = block[::-1] if self.transposed else block
        for (part, n), extent in zip(ends, blocks, strict=False):
            inside = {part.start, part.stop} - {0, n}
            if any(extent == WHOLE or end % extent for end in inside):
                return True
        return False

    def of_scales(self, shape: torch.Size, block: Block) -> Slot:
        """The place of its scales among those of a parameter, none of whose blocks it cuts."""
        index: list[Any] = [*(self.index or map(slice, (0,) * len(shape), shape))]
        for dim, (part, size) in enumerate(zip(index, shape, strict=True)):
            if isinstance(part, slice):
                extent = size if block[dim] == WHOLE else block[dim]
                index[dim] = slice(part.start // extent, ceil_div(part.stop, extent))
        sizes = [part.stop - part.start for part in index if isinstance(part, slice)]
        sizes[-2:] = sizes[-2:][::-1] if self.transposed else sizes[-2:]
        return replace(self, index=tuple(index), shape=torch.Size(sizes))


def published(model: nn.Module, method: str = "") -> dict[str, Slot]:
    """Where each tensor of a published checkpoint lies inside a model, by key.

    ``method`` is the ``quant_method`` of the checkpoint; names depend on it in Llama 4 alone.

    The model is plain or converted; it may be compiled, sharded by FSDP2, in a wrapper, or on the
    meta device. The keys are those that the plain model's ``save_pretrained`` writes, in the order
    of the model's parameters and of the parts inside each. Shared parameters have one key, and
    buffers of this library's layers, such as histories of amaxes, none. A model that is not
    Transformers' has its own names. Raises ValueError if a published tensor is no part of one
    parameter, or if a wrapper hides parameters.
    """
    plain, names = _plain(model)
    kept = _kept(plain)
    slots: list[tuple[str, Slot]] = []
    rest = dict(kept)
    for prefix, pretrained in _pretrained(plain):
        own = {name: x for name, x in rest.items() if name.startswith(prefix)}
        rest = {name: x for name, x in rest.items() if name not in own}
        slots += _reverted(pretrained, prefix, own)
    slots += [(name, Slot(name, (), False, x.shape)) for name, x in rest.items()]
    if method == COMPRESSED_TENSORS:
        slots = [part for key, slot in slots for part in _matrices_of(plain, key, slot)]
    order = {name: position for position, name in enumerate(kept)}
    slots.sort(key=lambda item: order[item[1].parameter])  # stable: parts keep their order
    return {key: replace(slot, parameter=names[slot.parameter]) for key, slot in slots}


def _matrices_of(plain: nn.Module, key: str, slot: Slot) -> list[tuple[str, Slot]]:
    """A stack of Llama 4's experts as matrices; any other tensor as it is.

    From files of compressed-tensors Transformers reads these experts as linear layers
    (``SequentialLlama4TextExperts``, ``quantizers/base.py``).
    """
    parent, _, own = slot.parameter.rpartition(".")
    if type(plain.get_submodule(parent)).__name__ != "Llama4TextExperts":
        return [(key, slot)]
    count, rows, columns = slot.shape
    parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
    size = columns // len(parts)
    found = []
    for expert, (i, part) in product(range(count), enumerate(parts)):
        index = expert, slice(0, rows), slice(i * size, (i + 1) * size)
        matrix = Slot(slot.parameter, index, True, torch.Size((size, rows)))
        found.append((f"{key.removesuffix(own)}{expert}.{part}.weight", matrix))
    return found


def tensor_of(model: nn.Module, slot: Slot) -> Tensor:
    """The parameter or buffer of a slot."""
    return attrgetter(slot.parameter)(model)


# --- the plain model


def walk(
    module: nn.Module, name: str = "", plain: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """(name, name without those of wrappers, module) of all modules, shared ones several times."""
    inside = inside_of(module)
    if inside is None:  # a wrapper shares its name with what it wraps
        yield name, plain, module
    for own, child in module._modules.items():
        if child is not None:
            yield from walk(
                child, within(name, own), plain if own == inside else within(plain, own)
            )


def within(prefix: str, name: str) -> str:
    """The name of a part of a module; ``prefix`` is empty for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def owners(model: nn.Module) -> Owners:
    """Tensor, by id -> the modules that have it: name without those of wrappers, module, own name.

    Shared modules come several times. Raises ValueError for layers that compressed-tensors runs.
    """
    found: Owners = defaultdict(list)
    for _, plain, module in walk(model):
        own_dicts = isinstance(module._parameters, dict)
        if hasattr(module, "quantization_scheme") or not own_dicts:  # it has casts and scales
            raise ValueError(
                f"{plain or 'the model'} is run by compressed-tensors: give from_pretrained "
                "quantization_config=CompressedTensorsConfig(dequantize=True), or load the files "
                "into a plain model by float8.checkpoints.load"
            )
        for own, tensor in (module._parameters | module._buffers).items():
            found[id(tensor)].append((plain, module, own))
    return found


def _plain(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """The model without wrappers, of plain types, and (plain name -> name) of its tensors."""
    modules: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, plain, module in walk(model):
        if isinstance(module, DelayedCast):
            continue
        kind = type(module)
        is_fsdp1 = kind.__name__.endswith("FullyShardedDataParallel")
        if is_fsdp1 or kind.__module__.startswith("peft."):
            raise ValueError(
                f"{name or 'the model'} is a {kind.__name__}, whose parameters are not those that "
                "are published: merge adapters of PEFT (merge_and_unload()), shard by fully_shard"
            )
        if kind.__bases__[0].__name__ == "FSDPModule":  # by fully_shard
            kind = kind.__bases__[1]
        modules[plain] = own = with_state_of(module, getattr(module, "plain_type", kind))
        own._modules.clear()
        names |= {
            within(plain, n): within(name, n) for n in (*module._parameters, *module._buffers)
        }
        if plain:
            parent, _, last = plain.rpartition(".")
            modules[parent]._modules[last] = own
    return modules[""], names


def _kept(plain: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint holds, each once."""
    found: dict[str, Tensor] = {}
    droppable: list[str] = []
    ignored: list[str] = []
    for name, module in plain.named_modules(remove_duplicate=False):
        own = module._parameters | module._buffers
        left = module._non_persistent_buffers_set
        found |= {within(name, n): x for n, x in own.items() if x is not None and n not in left}
        droppable += [within(name, n) for n in getattr(module, "_tied_weights_keys", None) or ()]
        ignored += [within(name, n) for n in getattr(module, "_keys_to_ignore_on_save", None) or ()]
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for name, x in found.items():
        by_tensor[id(x)] += [name] * (name not in ignored)
    # Transformers says which names of a shared weight it expects in files; else the first.
    kept = set()
    for group in by_tensor.values():
        main = [n for n in group if not any(re.search(key, n) for key in droppable)]
        kept |= {*(main[:1] or sorted(group)[-1:])}
    return {name: x for name, x in found.items() if name in kept}


def _pretrained(plain: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(prefix, module) of the outermost modules that are models of Transformers."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")  # without it there is none
    found: list[str] = []
    for name, module in plain.named_modules():
        prefix = within(name, "")
        is_one = modeling is not None and isinstance(module, modeling.PreTrainedModel)
        if is_one and not prefix.startswith(tuple(found)):
            found.append(prefix)
            yield prefix, module


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

    rules = getattr(model, "_weight_conversions", None) or ()  # those by which it was loaded
    if any(hasattr(op, "hf_quantizer") for rule in rules for op in getattr(rule, "operations", ())):
        model._weight_conversions = None  # of quantised files; Transformers 5.24 drops them
    roots = {name: _without_data(x.shape) for name, x in own.items()}
    name_of = {x.untyped_storage()._cdata: name for name, x in roots.items()}
    with _NoCopies():
        found = revert_weight_conversion(
            model, {n.removeprefix(prefix): x for n, x in roots.items()}
        )
    slots, bad = [], []
    left = {name: x.numel() for name, x in roots.items()}
    for key, part in found.items():
        name = name_of.get(part.untyped_storage()._cdata, "")
        if name and (slot := _slot(name, roots[name], part)) is not None:
            slots.append((prefix + key, slot))
            left[name] -= part.numel()
        else:
            bad.append(prefix + key)
    if bad := [*bad, *(name for name, count in left.items() if count)]:
        raise ValueError(
            f"{bad[0]}: in the files of Transformers it is no part of one parameter of "
            f"{type(model).__name__}, or the files lack a part (rows permuted, parameters joined). "
            "Leave its module out by passing another part of the model, as model.language_model"
        )
    slots.sort(key=lambda item: [getattr(i, "start", i) for i in item[1].index])
    return slots


def _without_data(shape: torch.Size) -> Tensor:
    """A meta tensor whose dimensions have strides of their own, those of size 1 too."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * (size + 2))
    return torch.empty_strided(shape, strides[: len(shape)], device="meta")


def _slot(name: str, root: Tensor, part: Tensor) -> Slot | None:
    """The place of a part, or None if no slices of a parameter give it."""
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
        return None
    index = [slice(i, i + sizes[dim]) if dim in sizes else i for dim, i in enumerate(index)]
    return Slot(name, tuple(index), transposed, part.shape)
