"""`compare`: which float8 layers hurt the result; `accurate_layers`: convert the others only.

::

    found = compare(model, batch, loss_fn=lambda out: F.cross_entropy(out, y))
    print(found)                                  # worst first
    found.worst(3)                                # ["blocks.11.ffn.down", ...]
    convert_to_float8_training(make_model(), module_filter_fn=accurate_layers(found, min_sqnr=20))

The error of a cast (`float8.numerics.inspect`) is not the error of the model: it may be averaged
away behind the layer, or amplified. So the batch runs in high precision, with all layers in float8,
and once for each layer with that layer alone in float8, from the same random numbers. For each
layer:

=============== =================================================================================
column          SQNR in dB (`float8.kernels.sqnr`) of
=============== =================================================================================
alone_output    the model's output, with this layer alone in float8
alone_gradient  all gradients of the model as one vector, with this layer alone in float8
output          this layer's output, with all layers in float8
grad_input      the gradient of this layer's input, with all layers in float8
grad_weight     the gradient of this layer's weight, with all layers in float8
=============== =================================================================================

The "alone" columns rank causes; the others show where errors have accumulated. None: there is
nothing to compare, as for a frozen weight's gradient. The reference is the model under
`float8.high_precision`, in its dtype: SQNRs above that of the dtype's rounding (about 50 dB in
bfloat16) mean nothing.

`accurate_layers` compares ``min_sqnr`` with the lowest SQNR of a layer. Of a `Report`, that is the
lowest of its operands' casts (about 32 dB is the best of E4M3, 26 dB that of E5M2); of a
`Comparison`, `LayerComparison.lowest`. The two differ: SQNR weighs by power, so that a weight with
one huge element has a high SQNR although all other elements were flushed; `compare` shows their
loss. None is ignored, and NaN is below everything. A layer that was not measured is an
error, since converting it or not would be a guess: exclude it before,
``all_of(skip_names("lm_head"), accurate_layers(report, 20))``, or give ``unknown``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from float8.arguments import check_type, did_you_mean
from float8.convert.after_step import NOT_CALLED
from float8.convert.filters import Because, ModuleFilter
from float8.convert.folding import folded, named
from float8.distributed.sync import has_other_ranks
from float8.kernels.sqnr import decibels, power
from float8.linear.layer import Float8Linear
from float8.linear.module import Float8Module, switched_off
from float8.numerics import passes
from float8.numerics.inspection import without_wrappers
from float8.numerics.snapshot import LAYER, Column, Report, text_table

_TABLE = [
    LAYER,
    Column("alone_output", "alone: output", ".1f"),
    Column("alone_gradient", "gradient", ".1f"),
    Column("output", "all: output", ".1f"),
    Column("grad_input", "grad_input", ".1f"),
    Column("grad_weight", "grad_weight", ".1f"),
]


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
    def lowest(self) -> float | None:
        """The lower of the two SQNRs alone, or the lowest of the others where it was not run alone.

        None is ignored, and NaN is below everything.
        """
        alone = (self.alone_output, self.alone_gradient)
        together = (self.output, self.grad_input, self.grad_weight)
        return _lowest(together if alone == (None, None) else alone)


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        layers: worst first.
        output: SQNR of the model's output in dB, all layers in float8.
        gradient: of all gradients as one vector; None where nothing requires one.
        loss_high_precision: the loss in high precision; None where there is no loss.
        loss_float8: the loss in float8; None where there is no loss.
        not_called: layers that did not run, as the model reads their weights itself.
        model: the name of the model's class.
    """

    layers: list[LayerComparison]
    output: float | None
    gradient: float | None
    loss_high_precision: float | None = None
    loss_float8: float | None = None
    not_called: list[str] = field(default_factory=list)
    model: str = field(default="", kw_only=True)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each layer, worst first.

        Keys: layer, and SQNRs in dB. ``alone_output`` and ``alone_gradient``: of the model's output
        and of all its gradients, with this layer alone in float8. ``output``, ``grad_input`` and
        ``grad_weight``: of this layer's output and gradients, with all layers in float8. None where
        there is nothing to compare.
        """
        return [asdict(layer) for layer in self.layers]

    def worst(self, count: int = 1) -> list[str]:
        """The names of the layers that hurt most, worst first.

        Args:
            count: how many.
        """
        return [layer.layer for layer in self.layers[:count]]

    def table(self, top: int | None = None) -> str:
        """The layers as text, worst first, in dB.

        Args:
            top: how many; None is all.
        """
        return text_table(_TABLE, self.rows(), top)

    def __str__(self) -> str:
        output, gradient = map(_TABLE[1].shown, (self.output, self.gradient))
        lines = [
            f"{self.model or 'model'} in float8 against high precision: output {output} dB, "
            f"gradient {gradient} dB"
        ]
        if self.loss_high_precision is not None:
            lines += [f"loss {self.loss_high_precision:.6g} -> {self.loss_float8:.6g}"]
        lines += [self.table(top=10), *folded((fqn, NOT_CALLED) for fqn in self.not_called)]
        return "\n".join(lines)


def compare(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: passes.LossFn | None = None,
    seed: int = 0,
    layers: Sequence[str] | str | None = None,
    alone: bool = True,
) -> Comparison:
    """Run a converted model in high precision and in float8, and rank its layers by their harm.

    Nothing of the model changes: gradients, buffers, delayed histories, random states, modes and
    hooks are as before, also when it raises. Delayed casts use the scales that they have. Under
    DDP or FSDP every rank has to call it. Each compares its own batch and shards, and gets None
    where they are not finite in high precision. A compiled model runs eagerly.

    The cost for L layers is L + 2 forwards and backwards, two copies of the gradients of all
    parameters, and in host memory two of the outputs and input gradients of the compared layers.
    ``layers`` and ``alone`` make it cheaper.

    Args:
        model: with `Float8Linear` layers; it runs in the mode that it is in.
        batch: the model is called as ``model(**batch)`` with a mapping, ``model(*batch)`` with a
            tuple or a list, and ``model(batch)`` with anything else.
        loss_fn: of the model's output; a scalar, where backward starts. By default that is
            ``output.loss`` or ``output["loss"]``, or the output if it is a scalar, or else its
            first floating point tensor times a random cotangent.
        seed: of dropout, and of the cotangent where there is no loss.
        layers: names, or shell patterns such as ``"blocks.3.*"``, of the layers to report, or one
            of them; the others take part in "all layers in float8".
        alone: False leaves the two columns of single layers out: 2 runs.

    Raises:
        ValueError: no layer of the model runs in float8, the model is not finite in high
            precision, or a name fits no layer.
        TypeError: ``model`` is no module, or ``loss_fn`` no function.
    """
    passes.check_run(model, loss_fn, "compare")
    chosen = _chosen(model, layers)
    every: set[Any] = {m for m in model.modules() if isinstance(m, Float8Module)}

    def run(in_float8: set[Any], shown: Mapping[str, nn.Module]) -> tuple[float | None, Tensors]:
        seen: Tensors = {}
        with switched_off(every - in_float8), _shown(shown, seen):
            found = passes.run_pass(model, batch, loss_fn, seed)
        seen |= {key: [gradient] for key, gradient in found.gradients.items()}
        return found.loss, seen | {"output": [found.output]}

    def of_model(found: Tensors) -> tuple[float | None, float | None]:
        keys = [key for key in exact | found if not isinstance(key, tuple)]  # but those of layers
        return sqnr_of(exact, found, ["output"]), sqnr_of(exact, found, set(keys) - {"output"})

    with passes.model_unchanged(model):
        loss_high_precision, exact = run(set(), chosen)
        of_own = [each for key, (each, *_) in exact.items() if not isinstance(key, tuple)]
        is_finite = all(bool(each.isfinite().all()) for each in of_own)
        if not is_finite and not has_other_ranks():
            raise ValueError(
                "the model is not finite in high precision, so that there is nothing to compare "
                "with; float8.find_nan(model, batch) names the first module that is not"
            )
        loss_float8, together = run(every, chosen)
        compared = []
        not_called = [name for name in chosen if (name, "output") not in exact]
        for name, layer in chosen.items():
            keys = (name, "output"), (name, "grad_input"), id(layer.weight)
            columns = [sqnr_of(exact, together, [key]) for key in keys]
            own = of_model(run({layer}, {})[1]) if alone else (None, None)
            if name not in not_called:
                compared.append(LayerComparison(name, *own, *columns))
    return Comparison(
        sorted(compared, key=lambda x: math.inf if x.lowest is None else x.lowest),
        *(of_model(together) if len(not_called) < len(every) else (None, None)),
        loss_high_precision,
        loss_float8,
        not_called,
        model=type(model).__name__,
    )


# Of a run: "output" of the model, gradients by the keys of `passes.RunResult`, and of each call of
# a layer that was shown (name, "output") and (name, "grad_input").
Tensors = dict[Any, list[Tensor]]


def sqnr_of(exact: Tensors, found: Tensors, keys: Iterable[Any]) -> float | None:
    """The SQNR in dB of the tensors of these keys as one vector; those of no key are zeros.

    None without an exact value that is finite and not zero, and where the shapes or the calls
    of a layer differ, as of tokens that were routed differently.
    """
    signal = noise = 0.0
    for key in keys:
        pairs = exact.get(key, ()), found.get(key, ())
        if isinstance(key, tuple) and len(pairs[0]) != len(pairs[1]):
            return None  # other calls of a layer
        for reference, other in zip_longest(*pairs):
            if reference is None or other is None:
                lost = power(other if reference is None else reference)
                signal, noise = signal + (0.0 if reference is None else lost), noise + lost
            elif reference.shape != other.shape:
                return None
            else:
                own = reference.to(other.device).double()
                signal, noise = signal + power(own), noise + power(own - other)
    return decibels(signal, noise) if signal and math.isfinite(signal) else None


def _shown(layers: Mapping[str, nn.Module], seen: Tensors) -> AbstractContextManager[None]:
    """Copy the outputs and input gradients of layers to the host."""

    def see(key: Any, value: Tensor) -> None:
        value = passes.local_part(value.detach())
        seen.setdefault(key, []).append(value.to("cpu", copy=True))

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if output is not None and passes.in_forward():  # it did not raise, and is not recomputed
            see((name, "output"), passes.main_tensor(output))

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> passes.CallArguments:
        return passes.with_gradient_hooks(args, kwargs, partial(see, (name, "grad_input")))

    return passes.watched(layers, leave, enter)


def _chosen(model: nn.Module, patterns: Sequence[str] | str | None) -> dict[str, Float8Linear]:
    known = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    known = {name: layer for name, layer in known.items() if not layer.high_precision}
    patterns = ["*"] if patterns is None else patterns
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(
                f"compare: layers: none that runs in float8 is called {pattern!r}, of "
                f"{', '.join([*known][:5]) or 'none: convert the model first'}; call it outside of "
                "float8.high_precision"
            )
    return {n: layer for n, layer in known.items() if any(fnmatchcase(n, p) for p in patterns)}


# --- a filter for conversion


def accurate_layers(
    report: Report | Comparison,
    min_sqnr: float,
    *,
    unknown: bool | None = None,
) -> ModuleFilter:
    """Return a ``module_filter_fn`` that converts the layers whose lowest SQNR is high enough.

    It works on any model of the same layer names; prefixes of ``torch.compile``, DDP and Fabric do
    not matter.

    Args:
        report: of `float8.numerics.inspect`, or of `float8.numerics.compare`.
        min_sqnr: in dB; a layer with less is left in high precision.
        unknown: of a layer that was not measured: True converts it, False does not, None raises.

    Returns:
        (module, name) -> whether to convert it; for `float8.filters.all_of` too. It raises a
        ValueError for a layer that was not measured.

    Raises:
        TypeError: ``report`` is neither, or ``min_sqnr`` no number.
    """
    check_type(min_sqnr, (int, float), "accurate_layers", "min_sqnr", "a number of dB")
    such_as = "what float8.inspect or float8.compare returned"
    check_type(report, (Report, Comparison), "accurate_layers", "report", such_as)
    sqnrs: dict[str, list[float | None]] = defaultdict(list)
    if isinstance(report, Report):
        for cast in report.casts:
            sqnrs[without_wrappers(cast.layer)].append(cast.sqnr)
    else:
        for layer in report.layers:
            sqnrs[without_wrappers(layer.layer)].append(layer.lowest)
    lowest = {fqn: low for fqn, of in sqnrs.items() if (low := _lowest(of)) is not None}

    def reason(module: nn.Module, fqn: str) -> str | None:
        sqnr = lowest.get(without_wrappers(fqn))
        if sqnr is not None:
            text = f"its lowest SQNR is {sqnr:.1f} dB, and min_sqnr is {min_sqnr:g}"
            return None if sqnr >= min_sqnr else text
        if unknown is None and not isinstance(module, nn.Embedding):  # it multiplies nothing
            raise ValueError(
                f"{named(fqn)} has no SQNR in the report, which knows {len(lowest)} layers"
                f"{did_you_mean(fqn, lowest)}: leave it out with all_of(skip_names(...), "
                "accurate_layers(...)), or give unknown=True (convert) or unknown=False"
            )
        return "it was not measured" if unknown is False else None

    return Because(reason)


def _lowest(values: Iterable[float | None]) -> float | None:
    """The lowest of the SQNRs that are known, NaN below all; None if none is."""
    known = [-math.inf if math.isnan(value) else value for value in values if value is not None]
    return min(known, default=None)
