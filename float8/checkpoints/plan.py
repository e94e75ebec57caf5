"""`SavePlan`: what a checkpoint will have. `Writing`: the same with the tensors, one by one.

A `Writing` is made of a model (``weights.py``) or of files (``rewriting.py``), which differ in how
they read a tensor.

**Scales that layers share.** Engines fuse the projections that read the same input, and a fused
weight with one scale per tensor has one scale. If the parts had their own, the engine would
dequantise them and cast again with the largest. So the parts of `FUSED_NAMES` that are cast with
one scale per tensor get their largest, once, from high precision. Stored weights keep theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.checkpoints.casts import CAST_ANEW, STORED, TRAINING_CAST, StoredLayer
from float8.checkpoints.files import Spec, in_files, table
from float8.checkpoints.layouts import WEIGHT, Layout
from float8.convert.folding import folded, pattern_of
from float8.formats import E4M3
from float8.granularity import WHOLE, Tensorwise
from float8.tensor import Float8Tensor

# The last parts of the names of projections that engines fuse.
FUSED_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
# The last part of a name -> which dimension vLLM shards, 0 or 1.
_SHARDED: dict[str, int | None] = {
    **{name: 0 for fused in FUSED_NAMES[:-1] for name in fused},
    **{name: None for name in FUSED_NAMES[-1]},
    **{"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1, "down_proj": 1, "w2": 1},
}
_TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class SavePlan:
    """What a checkpoint will have. ``print(plan)`` shows it as a table.

    Layers share a line of the table if their names differ only in numbers.

    Attributes:
        layout: how layers in float8 are stored; None if the whole checkpoint is in high precision.
        layers: the layers in float8, as files name them -> how their weights are cast.
        skipped: the linear layers that stay in high precision -> why.
        tensors: key -> dtype, shape and file of every tensor.
        quantization_config: what ``config.json`` says to readers.
        tensor_parallel_sizes: see `tensor_parallel_sizes`.
    """

    layout: Layout | None
    layers: dict[str, str]
    skipped: dict[str, str]
    tensors: dict[str, Spec]
    quantization_config: dict[str, Any]
    tensor_parallel_sizes: tuple[int, ...] | None = None

    @property
    def files(self) -> dict[str, int]:
        """File -> bytes of its tensors."""
        found: dict[str, int] = defaultdict(int)
        for spec in self.tensors.values():
            found[spec.file] += spec.nbytes
        return dict(found)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.files.values())

    def __str__(self) -> str:
        sizes = {key: spec.nbytes for key, spec in self.tensors.items()}
        lines: dict[tuple[str, str, str], list[int]] = defaultdict(list)  # -> bytes
        suffixes = (WEIGHT,) if self.layout is None else self.layout.suffixes
        for name, how in self.layers.items():
            keys = [name + suffix for suffix in suffixes]
            own = self.tensors[keys[0]].shape
            shape = "x".join(map(str, own if self.layout is None else self.layout.shape_of(own)))
            lines[pattern_of(name), shape, how].append(sum(sizes.pop(key, 0) for key in keys))
        for key, nbytes in sizes.items():
            dtype = str(self.tensors[key].dtype).removeprefix("torch.")
            lines[f"other tensors, {dtype}", "", "as they are"].append(nbytes)
        rows = [[a, len(n), b, f"{sum(n) / 1e6:,.2f}", c] for (a, b, c), n in lines.items()]
        title = "high precision" if self.layout is None else repr(self.layout)
        files = f"{len(self.files)} file{'s' * (len(self.files) > 1)}"
        parts = [
            f"{title}\n{len(self.layers)} layers in float8, {self.nbytes / 1e9:.3g} GB in {files}",
            table(["layers", "count", "weight", "MB", "float8 by"], rows, "lrrrl"),
        ]
        if (ranks := self.tensor_parallel_sizes) is not None:
            of = f"{', '.join(map(str, ranks)) or 'none'} of {_TENSOR_PARALLEL_SIZES}"
            parts.append(f"loads in vLLM 0.33 with tensor-parallel sizes {of}")
            if len(ranks) < 2 or ranks[0] > 1:
                parts[-1] += ";\nlayout CompressedTensors(Rowwise()) has no blocks that ranks cut"
        if self.skipped:
            kinds = Counter((pattern_of(name), why) for name, why in self.skipped.items())
            left = [[name, count, fill(why, 60)] for (name, why), count in kinds.items()]
            parts.append(table(["in high precision", "count", "why"], left, "lrl"))
        return "\n\n".join(parts)


def tensor_parallel_sizes(
    layout: Layout | None,
    layers: Collection[str],
    tensors: Mapping[str, Spec],
    model_config: Mapping[str, Any],
) -> tuple[int, ...] | None:
    """With which numbers of ranks, of 1, 2, 4, 8 and 16, vLLM 0.33 reads a checkpoint in blocks.

    A rank's part of a weight must end between blocks, and so must each fused part but the last.
    Of other dense weights vLLM takes wrong scales, or raises an error. It splits the blocks of the
    experts of ``fine_grained`` down to 32. Ranks share heads of keys and values that are fewer.
    (``validate_fp8_block_shape`` and ``refine_fp8_moe_block_shape``.) None if the layout has no
    such blocks, or if names and the model's ``config.json`` do not say how weights are sharded.
    """
    own = model_config.get("text_config") or model_config
    heads = own.get("num_attention_heads")
    kv_heads = own.get("num_key_value_heads") or heads
    is_known = {name.rpartition(".")[2] for name in layers} <= _SHARDED.keys()
    if not (is_known and isinstance(heads, int) and isinstance(kv_heads, int)):
        return None
    if layout is None or min(layout.block) <= 1:
        return None

    def fits(name: str, size: int) -> bool:
        last, shape = name.rpartition(".")[2], tensors[name + WEIGHT].shape
        dim, is_expert = _SHARDED[last], ".experts." in name
        size = 1 if dim is None else size
        ranks = min(size, kv_heads) if last in ("k_proj", "v_proj") else size
        part, rest = divmod(shape[dim or 0], ranks)
        if not rest and part % layout.block[dim or 0] == 0:
            return True
        if is_expert and layout.name == "fine_grained":
            return not rest and gcd(*layout.block, *shape, part) >= 32
        return size == 1 and not any(last in x[:-1] for x in FUSED_NAMES)

    return tuple(
        size
        for size in _TENSOR_PARALLEL_SIZES
        if heads % size == max(size, kv_heads) % min(size, kv_heads) == 0
        and all(fits(name, size) for name in layers)
    )


class Writing:
    """A checkpoint that is planned, and can be made tensor by tensor.

    ``specs`` has the keys of the model or of the source, and how tensors are stored that are in
    high precision; ``layers`` the layers in float8, or the reason why one cannot be stored.
    ``read(key)`` returns a whole tensor; of sharded models, all ranks call it. ``model_config`` is
    the content of ``config.json``, empty if there is none. ``left`` has other names of modules in
    high precision. Raises ValueError with all these reasons, or if readers would take a name of
    ``skipped`` or ``left`` for one of ``layers``.

    Attributes:
        plan: what the result will be.
        keys: those of ``specs``.
    """

    def __init__(
        self,
        layout: Layout | None,
        specs: Mapping[str, Spec],
        layers: Mapping[str, StoredLayer | str],
        skipped: dict[str, str],
        max_shard_bytes: float,
        read: Callable[[str], Tensor],
        model_config: Mapping[str, Any],
        left: Collection[str] = (),
    ) -> None:
        if problems := [(name, why) for name, why in layers.items() if isinstance(why, str)]:
            raise ValueError("\n  ".join([f"{layout!r} cannot store:", *folded(problems)]))
        own = {name: each for name, each in layers.items() if isinstance(each, StoredLayer)}
        self.keys, self._specs, self._read = [*specs], specs, read
        self._layers = {x.name + x.layout.weight_key: x for x in own.values()}
        self._fused: dict[str, list[StoredLayer]] = {}  # name -> the layers that engines fuse
        self._scales: dict[str, Tensor] = {}  # the first of fused layers -> their scale
        for name in own if layout is not None and layout.granularity == Tensorwise() else ():
            parent, dot, last = name.rpartition(".")
            group = next((group for group in FUSED_NAMES if last in group), ())
            fused = [own[n] for each in group if (n := f"{parent}{dot}{each}") in own]
            self._fused |= {name: fused} if len(fused) > 1 else {}
        stored: dict[str, Spec] = {}
        for key, spec in specs.items():
            stored |= self._layers[key].specs if key in self._layers else {key: spec}
        tensors = in_files(stored, max_shard_bytes)
        config = {} if layout is None else layout.quantization_config(own, [*skipped, *left])
        how = {name: self._how(layer) for name, layer in own.items()}
        sizes = tensor_parallel_sizes(layout, how, tensors, model_config)
        self.plan = SavePlan(layout, how, skipped, tensors, config, sizes)

    def _how(self, layer: StoredLayer) -> str:
        """How a layer's weight is cast, in words."""
        fused, how = self._fused.get(layer.name, []), layer.how
        others = ", ".join(each.name.rpartition(".")[2] for each in fused if each is not layer)
        if others and how == STORED:
            return f"{how}; engines that fuse it with {others} cast it again"
        how = CAST_ANEW if others and how == TRAINING_CAST else how
        return f"{how}, one scale with {others}" if others else how

    def tensors(self, keys: Iterator[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of these keys, one after the other."""
        for key in keys:
            yield from self.gather(key)().items()

    @torch.no_grad()
    def gather(self, key: str) -> Callable[[], dict[str, Tensor]]:
        """Read what the tensors of a key need. The function that is returned makes them.

        Where a model is sharded, all ranks call this, for all keys in order.
        """
        x, layer = self._read(key), self._layers.get(key)
        if layer is None:
            return partial(_in_high_precision, key, x, self._specs[key].dtype)
        return partial(layer.tensors, x, self._shared_scale(layer))

    def _shared_scale(self, layer: StoredLayer) -> Tensor | None:
        """The scale (1, 1) that a layer has with those that engines fuse with it, or None."""
        casts = [each for each in self._fused.get(layer.name, ()) if each.how != STORED]
        if layer.how == STORED or len(casts) < 2:
            return None
        first = casts[0].name
        if first not in self._scales:
            scales = [self._scale(each) for each in casts]
            self._scales[first] = torch.stack([x.to(scales[0].device) for x in scales]).amax(0)
        return self._scales[first]

    def _scale(self, layer: StoredLayer) -> Tensor:
        if layer.known is not None:
            return layer.known
        x = self._read(layer.name + WEIGHT)
        x = x.dequantize(torch.float32) if isinstance(x, Float8Tensor) else x
        amax = kernels.amax(x, (WHOLE, WHOLE))
        return kernels.scale_from_amax(amax, E4M3.max, layer.scale_format.value)


def _in_high_precision(key: str, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    made = x.dequantize(dtype) if isinstance(x, Float8Tensor) else x.to(dtype)
    if made.dtype == torch.float16 != x.dtype and not bool(made.isfinite().all()):
        raise ValueError(f"{key}: it has values that float16 does not hold")
    return {key: made}
