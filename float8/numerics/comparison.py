"""`compare`: which float8 layers hurt the result, found by running them one at a time.

::

    found = compare(model, batch, loss_fn=lambda out: F.cross_entropy(out, y))
    print(found)                                  # worst first
    found.worst(3)                                # ["blocks.11.ffn.down", ...]

What a cast does to its operand (`float8.numerics.inspect`) is not yet what it does to the model:
an error may be averaged away behind the layer, or amplified. So the batch runs in high precision,
with everything in float8, and once for each layer with that layer alone in float8, from the same
random numbers. For each layer:

=============== =================================================================================
column          SQNR in dB (`float8.numerics.passes`) of
=============== =================================================================================
alone_output    the model's output, with this layer alone in float8
alone_gradient  all gradients of the model as one vector, with this layer alone in float8
output          this layer's output, with all layers in float8
grad_input      the gradient of this layer's input, with all layers in float8
grad_weight     the gradient of this layer's weight, with all layers in float8
=============== =================================================================================

"Alone" ranks causes; the others say where errors have piled up. None: nothing to compare, as a
frozen weight's gradient. The reference is the model under `float8.high_precision`, in the dtype
that it has: differences below that dtype's rounding (about 50 dB in bfloat16) say nothing.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from float8.arguments import check_function, check_module, described
from float8.linear.layer import Float8Linear
from float8.numerics.batches import LossFn, is_one_of_many
from float8.numerics.passes import Noise, Pass, Watch, only_in_float8, run_pass
from float8.numerics.rows import encoded
from float8.numerics.untouched import untouched


@dataclass(frozen=True)
class LayerComparison:
    """One layer of a `Comparison`; the columns are those of this file's table, in dB."""

    layer: str
    alone_output: float | None
    alone_gradient: float | None
    output: float | None
    grad_input: float | None
    grad_weight: float | None

    @property
    def harm(self) -> float:
        """The lower of the two SQNRs alone, or of the others where it was not run alone."""
        alone = (self.alone_output, self.alone_gradient)
        together = (self.output, self.grad_input, self.grad_weight)
        columns = together if alone == (None, None) else alone
        return min((value for value in columns if value is not None), default=math.inf)


COLUMNS = ("alone_output", "alone_gradient", "output", "grad_input", "grad_weight")
_HEADERS = ("layer", "alone: output", "gradient", "all: output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        layers: worst first.
        output: SQNR of the model's output in dB, all layers in float8.
        gradient: of all gradients as one vector; None where nothing asks for one.
        loss_high_precision, loss_float8: None where there is no loss.
        model: the name of the model's class.
    """

    layers: list[LayerComparison]
    output: float | None
    gradient: float | None
    loss_high_precision: float | None = None
    loss_float8: float | None = None
    model: str = field(default="", kw_only=True)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each layer, worst first; see the table of this file for the keys."""
        return [asdict(layer) for layer in self.layers]

    def worst(self, count: int = 1) -> list[str]:
        """The names of the layers that hurt most."""
        return [layer.layer for layer in self.layers[:count]]

    def table(self, top: int | None = None) -> str:
        """The layers as text, worst first, in dB.

        Args:
            top: how many; None is all.
        """
        from tabulate import tabulate

        shown = self.layers[:top]
        cells = [[one.layer, *(_shown(getattr(one, name)) for name in COLUMNS)] for one in shown]
        align = ["left"] + ["right"] * len(COLUMNS)
        text = tabulate(cells, _HEADERS, "simple", colalign=align, disable_numparse=True)
        left = len(self.layers) - len(shown)
        return f"{text}\nand {left} more" if left else text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as strict JSON, for other programs; inf is the word "inf"."""
        content = {"format": "float8.comparison", "version": 1, **asdict(self)}
        text = json.dumps(encoded(content), allow_nan=False, indent=1)
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        lines = [
            f"{self.model or 'model'} in float8 against high precision: output "
            f"{_shown(self.output)} dB, gradient {_shown(self.gradient)} dB"
        ]
        if self.loss_high_precision is not None:
            lines += [f"loss {self.loss_high_precision:.6g} -> {self.loss_float8:.6g}"]
        return "\n".join([*lines, self.table(top=10)])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def compare(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    seed: int = 0,
    layers: Sequence[str] | None = None,
    alone: bool = True,
) -> Comparison:
    """Run a converted model in high precision and in float8, and name the layers that hurt most.

    Nothing of the model changes: gradients, buffers, delayed histories, random states, modes and
    hooks are as before, also when it raises. Delayed casts use the scales that they have. Under
    DDP or FSDP every rank has to call it, and sees its own batch and shards (and None where it is
    not finite in high precision). A compiled model runs eagerly.

    The cost for L layers: L + 2 forwards and backwards. Held meanwhile: two copies of the gradients
    of all parameters, and in host memory the outputs and input gradients of the compared layers.
    ``layers`` and ``alone`` make it cheaper.

    Args:
        model: with `Float8Linear` layers; it runs in the mode that it is in.
        batch: a mapping, tuple, list or single argument of the model; see
            `float8.numerics.batches` for what backward starts from.
        loss_fn: of the model's output; a scalar.
        seed: of dropout, and of the cotangent where there is no loss.
        layers: names, or shell patterns such as ``"blocks.3.*"``, of the layers to report; all
            others take part in "all layers in float8".
        alone: False leaves the two columns of single layers out: 2 runs.

    Raises:
        ValueError: the model has no float8 layer, runs under `high_precision`, or is not finite in
            high precision; or a name fits no layer.
        TypeError: ``model`` is no module, or ``loss_fn`` no function.
    """
    check_module(model, "compare")
    if loss_fn is not None:
        check_function(loss_fn, "compare", "loss_fn")
    chosen = _chosen(model, layers)
    with untouched(model):
        kept: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)
        keep = Watch(chosen, lambda *key, **_: kept[key[:2]].append(_on_host(key[2])))
        with only_in_float8(model, set()), keep.open():
            reference = run_pass(model, batch, loss_fn, seed, keep)
        if not reference.is_finite and not is_one_of_many():
            raise ValueError(
                "the model is not finite in high precision, so that there is nothing to compare "
                "with; float8.find_nan(model, batch) names the first module that is not"
            )
        against = _Against(kept)
        held = Watch(chosen, against)
        with held.open():
            together = run_pass(model, batch, loss_fn, seed, held)
        columns = {name: against.columns(name) for name in chosen}
        kept.clear()
        for name, layer in chosen.items():
            columns[name]["grad_weight"] = _sqnr_of_weight(layer, reference, together)
            if alone:
                with only_in_float8(model, {layer}):
                    single = run_pass(model, batch, loss_fn, seed)
                columns[name]["alone_output"] = reference.sqnr_of_output(single)
                columns[name]["alone_gradient"] = reference.sqnr_of_gradients(single)
    found = [LayerComparison(name, *(c.get(k) for k in COLUMNS)) for name, c in columns.items()]
    return Comparison(
        sorted(found, key=lambda layer: layer.harm),
        reference.sqnr_of_output(together),
        reference.sqnr_of_gradients(together),
        reference.loss,
        together.loss,
        model=type(model).__name__,
    )


class _Against:
    """Compares what layers compute with what they computed before, call by call."""

    def __init__(self, kept: Mapping[tuple[str, str], list[Tensor]]) -> None:
        self.kept = kept
        self.noise: defaultdict[tuple[str, str], Noise] = defaultdict(Noise)
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)

    def __call__(self, layer: str, kind: str, value: Tensor) -> None:
        key, before = (layer, kind), self.kept.get((layer, kind), [])
        if self.calls[key] < len(before):
            self.noise[key].add(before[self.calls[key]], value)
        self.calls[key] += 1

    def columns(self, layer: str) -> dict[str, float | None]:
        """The SQNR of each kind; None where the layer was not called as often as before."""
        return {
            kind: self.noise[layer, kind].sqnr
            for kind in ("output", "grad_input")
            if self.calls[layer, kind] == len(self.kept.get((layer, kind), []))
        }


def _chosen(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, Float8Linear]:
    known = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    if not known:
        raise ValueError(
            "the model has no Float8Linear: convert it first (convert_to_float8_training), its "
            "high precision is compared with the float8 that it has then"
        )
    off = [name or "the model" for name, layer in known.items() if layer.high_precision]
    if off:
        raise ValueError(f"{off[0]} runs under float8.high_precision: call compare outside of it")
    if patterns is None:
        return known
    if isinstance(patterns, str):
        raise TypeError(f"layers must be a sequence of names, got the string {patterns!r}")
    if not isinstance(patterns, Collection) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"layers must be a sequence of names, got {described(patterns)}")
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            some = ", ".join(list(known)[:5])
            raise ValueError(f"no float8 layer is called {pattern!r}; there are {some}, ...")
    return {n: m for n, m in known.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _sqnr_of_weight(layer: Float8Linear, reference: Pass, other: Pass) -> float | None:
    noise = Noise()
    noise.add(reference.gradients.get(id(layer.weight)), other.gradients.get(id(layer.weight)))
    return noise.sqnr
