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
`Comparison`, the lower of the two "alone" columns. The two differ: SQNR weighs by power, so that a
weight with one huge element has a high SQNR although all other elements were flushed; `compare`
shows their loss. None is ignored, and NaN is below everything. A layer that was not measured is an
error, since converting it or not would be a guess: exclude it before,
``all_of(skip_names("lm_head"), accurate_layers(report, 20))``, or give ``unknown``.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from float8.arguments import check_type, described, did_you_mean
from float8.convert.filters import ModuleFilter, with_reason
from float8.kernels.sqnr import decibels, power
from float8.linear.layer import Float8Linear
from float8.numerics.display import layer_name, simple_table
from float8.numerics.inspection import name_in_model
from float8.numerics.passes import (
    LossFn,
    RunResult,
    Watcher,
    check_run,
    has_other_ranks,
    local_part,
    main_tensor,
    model_unchanged,
    only_in_float8,
    run_pass,
    watched,
)
from float8.numerics.snapshot import Report, strict_json
from float8.numerics.statistics import OPERANDS

ALONE = ("alone_output", "alone_gradient")
COLUMNS = (*ALONE, "output", "grad_input", "grad_weight")
_HEADERS = ("layer", "alone: output", "gradient", "all: output", "grad_input", "grad_weight")


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


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        layers: worst first.
        output: SQNR of the model's output in dB, all layers in float8.
        gradient: of all gradients as one vector; None where nothing requires one.
        loss_high_precision: the loss in high precision; None where there is no loss.
        loss_float8: the loss in float8; None where there is no loss.
        model: the name of the model's class.
    """

    layers: list[LayerComparison]
    output: float | None
    gradient: float | None
    loss_high_precision: float | None = None
    loss_float8: float | None = None
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
        rows = [[one.layer, *(_decibels(getattr(one, n)) for n in COLUMNS)] for one in self.layers]
        return simple_table(_HEADERS, rows, 1, top)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as strict JSON, for other programs; inf is the string "inf".

        Args:
            path: of the file.
        """
        content = {"format": "float8.comparison", "version": 1, **asdict(self)}
        text = json.dumps(strict_json(content), allow_nan=False, indent=1)
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        lines = [
            f"{self.model or 'model'} in float8 against high precision: output "
            f"{_decibels(self.output)} dB, gradient {_decibels(self.gradient)} dB"
        ]
        if self.loss_high_precision is not None:
            lines += [f"loss {self.loss_high_precision:.6g} -> {self.loss_float8:.6g}"]
        return "\n".join([*lines, self.table(top=10)])


def _decibels(value: float | None) -> str:
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
    """Run a converted model in high precision and in float8, and rank its layers by their harm.

    Nothing of the model changes: gradients, buffers, delayed histories, random states, modes and
    hooks are as before, also when it raises. Delayed casts use the scales that they have. Under
    DDP or FSDP every rank has to call it. Each compares its own batch and shards, and gets None
    where they are not finite in high precision. A compiled model runs eagerly.

    The cost for L layers is L + 2 forwards and backwards, two copies of the gradients of all
    parameters, and in host memory the outputs and input gradients of the compared layers.
    ``layers`` and ``alone`` make it cheaper.

    Args:
        model: with `Float8Linear` layers; it runs in the mode that it is in.
        batch: the model is called as ``model(**batch)`` with a mapping, ``model(*batch)`` with a
            tuple or a list, and ``model(batch)`` with anything else.
        loss_fn: of the model's output; a scalar, where backward starts. By default that is
            ``output.loss`` or ``output["loss"]``, or the output if it is a scalar, or else its
            first floating point tensor times a random cotangent.
        seed: of dropout, and of the cotangent where there is no loss.
        layers: names, or shell patterns such as ``"blocks.3.*"``, of the layers to report; the
            others take part in "all layers in float8".
        alone: False leaves the two columns of single layers out: 2 runs.

    Raises:
        ValueError: the model has no float8 layer, runs under `high_precision`, or is not finite in
            high precision; or a name fits no layer.
        TypeError: ``model`` is no module, or ``loss_fn`` no function.
    """
    check_run(model, loss_fn, "compare")
    chosen = _chosen(model, layers)
    with model_unchanged(model):
        seen = _Results()
        with only_in_float8(model, set()), watched(chosen, seen):
            reference = run_pass(model, batch, loss_fn, seed)
        if not reference.is_finite and not has_other_ranks():
            raise ValueError(
                "the model is not finite in high precision, so that there is nothing to compare "
                "with; float8.find_nan(model, batch) names the first module that is not"
            )
        errors = _Results(seen.found)
        with watched(chosen, errors):
            together = run_pass(model, batch, loss_fn, seed)
        columns = {name: errors.columns(name) for name in chosen}
        for name, layer in chosen.items():
            key = id(layer.weight)
            columns[name]["grad_weight"] = _of_gradients(reference, together, [key])
            if alone:
                with only_in_float8(model, {layer}):
                    single = run_pass(model, batch, loss_fn, seed)
                columns[name]["alone_output"] = _of_outputs(reference, single)
                columns[name]["alone_gradient"] = _of_gradients(reference, single)
    found = [LayerComparison(name, *(c.get(k) for k in COLUMNS)) for name, c in columns.items()]
    return Comparison(
        sorted(found, key=lambda layer: layer.harm),
        _of_outputs(reference, together),
        _of_gradients(reference, together),
        reference.loss,
        together.loss,
        model=type(model).__name__,
    )


Powers = tuple[float, float]  # of a reference, and of the error of another value


def powers_of(reference: Tensor | None, other: Tensor | None) -> Powers:
    """Of two tensors of one quantity, where None stands for zeros.

    The first is inf where they have other shapes: tokens were routed differently.
    """
    if reference is None or other is None:
        signal = 0.0 if reference is None else power(reference)
        return signal, signal if other is None else power(other)
    if reference.shape != other.shape:
        return math.inf, 0.0
    exact = reference.detach().to(other.device).double()
    return power(exact), power(exact - other.detach())


def sqnr_of(powers: Iterable[Powers]) -> float | None:
    """The SQNR in dB of all as one vector; None without a finite reference that is not zero."""
    signals, noises = zip(*powers, strict=True)
    signal = sum(signals)
    return decibels(signal, sum(noises)) if signal and math.isfinite(signal) else None


def _of_outputs(reference: RunResult, other: RunResult) -> float | None:
    return sqnr_of([powers_of(reference.output, other.output)])


def _of_gradients(reference: RunResult, other: RunResult, keys: Iterable[Any] = ()) -> float | None:
    of, than = reference.gradients, other.gradients
    return sqnr_of([(0.0, 0.0), *(powers_of(of.get(k), than.get(k)) for k in keys or of | than)])


class _Results(Watcher):
    """The outputs and input gradients of layers, on the host, by (layer, kind).

    Of a second run, with the results of the first: the powers of the first's and of the errors.
    """

    def __init__(self, expected: dict[tuple[str, str], list[Any]] | None = None) -> None:
        self.expected = expected
        self.found: dict[tuple[str, str], list[Any]] = {}

    def add(self, key: tuple[str, str], value: Tensor) -> None:
        """Add the next call of a layer."""
        found = self.found.setdefault(key, [])
        if self.expected is None:
            found.append(value.detach().to("cpu", copy=True))
        else:
            before = self.expected.get(key, [])[len(found) : len(found) + 1]
            found += [powers_of(each, value) for each in before] or [(math.inf, 0.0)]

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        if output is not None:  # otherwise it raised
            self.add((name, "output"), local_part(main_tensor(output)))

    def see_grad_input(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        self.add((name, "grad_input"), local_part(gradient))

    def columns(self, layer: str) -> dict[str, float | None]:
        """The SQNR of each kind; none where the layer was not called as often as before."""
        return {
            kind: sqnr_of(calls)
            for kind in ("output", "grad_input")
            if (calls := self.found.get((layer, kind)))
            and len(calls) == len((self.expected or {}).get((layer, kind), []))
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
    _check_names(patterns, "layers", "compare")
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            some = ", ".join(list(known)[:5])
            raise ValueError(f"no float8 layer is called {pattern!r}; there are {some}, ...")
    return {n: m for n, m in known.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def _check_names(names: Any, argument: str, caller: str) -> None:
    """Raise TypeError unless these are names: a string would be taken for its letters."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{caller}: {argument} is a sequence of names, got {described(names)}")


# --- a filter for conversion


def accurate_layers(
    report: Report | Comparison,
    min_sqnr: float,
    *,
    by: Sequence[str] | None = None,
    unknown: bool | None = None,
) -> ModuleFilter:
    """Return a ``module_filter_fn`` that converts the layers whose lowest SQNR is high enough.

    It works on any model of the same layer names; prefixes of ``torch.compile``, DDP and Fabric do
    not matter.

    Args:
        report: of `float8.numerics.inspect`, or of `float8.numerics.compare`.
        min_sqnr: in dB; a layer with less is left in high precision.
        by: which numbers count: operands of a `Report` ("input", "weight", "grad_output"), columns
            of a `Comparison` ("alone_output", "alone_gradient", "output", "grad_input",
            "grad_weight"). By default all operands, and the two "alone" columns.
        unknown: of a layer that was not measured: True converts it, False does not, None raises.

    Returns:
        (module, name) -> whether to convert it; for `float8.filters.all_of` too. It raises a
        ValueError for a layer that was not measured.

    Raises:
        ValueError: ``by`` names something else, or a number that no layer has.
        TypeError: ``report`` is neither, or ``min_sqnr`` no number.
    """
    check_type(min_sqnr, (int, float), "accurate_layers", "min_sqnr", "a number of dB")
    lowest = _lowest(report, by)

    def is_accurate(module: nn.Module, fqn: str) -> bool:
        sqnr = lowest.get(_without_wrappers(fqn))
        if sqnr is not None:
            return sqnr >= min_sqnr
        if unknown is None and not isinstance(module, nn.Embedding):  # it multiplies nothing
            raise ValueError(
                f"{layer_name(fqn)} has no SQNR in the report, which knows {len(lowest)} layers"
                f"{did_you_mean(fqn, lowest)}: leave it out with all_of(skip_names(...), "
                "accurate_layers(...)), or give unknown=True (convert) or unknown=False"
            )
        return unknown is not False

    def reason(module: nn.Module, fqn: str) -> str:
        sqnr = lowest.get(_without_wrappers(fqn))
        if sqnr is None:
            return "it was not measured"
        return f"its lowest SQNR is {sqnr:.1f} dB, and min_sqnr is {min_sqnr:g}"

    return with_reason(is_accurate, reason)


def _lowest(report: Report | Comparison, by: Sequence[str] | None) -> dict[str, float]:
    """Layer -> its lowest SQNR; without layers that have none."""
    such_as = "what float8.inspect or float8.compare returned"
    check_type(report, (Report, Comparison), "accurate_layers", "report", such_as)
    is_report = isinstance(report, Report)
    known: Sequence[str] = OPERANDS if is_report else COLUMNS
    chosen: Sequence[str] = OPERANDS if is_report else ALONE
    if by is not None:
        _check_names(by, "by", "accurate_layers")
        if not by or not set(by) <= set(known):
            raise ValueError(f"by takes some of {', '.join(known)}, got {list(by)}")
        chosen = by
    if isinstance(report, Report):
        pairs = [(cast.layer, cast.sqnr) for cast in report.casts if cast.operand in chosen]
    else:
        pairs = [(layer.layer, getattr(layer, n)) for layer in report.layers for n in chosen]
    lowest: dict[str, float] = {}
    for layer, sqnr in pairs:
        if sqnr is not None:
            value, name = -math.inf if math.isnan(sqnr) else sqnr, _without_wrappers(layer)
            lowest[name] = min(value, lowest.get(name, math.inf))
    if pairs and not lowest:
        raise ValueError(
            f"no layer of the report has an SQNR of {', '.join(chosen)}: name others by=(...), or "
            "compare without alone=False"
        )
    return lowest


def _without_wrappers(fqn: str) -> str:
    parts = name_in_model(fqn).split(".")
    return ".".join(part for part in parts if part != "module")  # DDP's
