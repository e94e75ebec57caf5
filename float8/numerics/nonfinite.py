"""`find_nan`: the first module and tensor of a model that is not finite.

::

    print(find_nan(model, batch, loss_fn=lambda out: F.cross_entropy(out, y)))

It looks in the order in which errors arise. First come the batch, parameters and scales. In the
forward, inner modules end before outer ones, so the first output with a NaN is that of the
innermost module that made it. Then come the loss and, in the order of backward, the gradients. A
tensor that is made between modules, by functions in a forward, belongs to the module around them,
and the last finite tensor before it is named.

**What counts.** A NaN always counts; so does an inf in a parameter, in the loss or in a parameter's
gradient. An inf elsewhere counts if the run ends in one of those, or with an inf in its output:
then the origin is the first place where it came out of finite tensors, and that is the finding.
Other infs are harmless: attention masks are -inf, and softmax turns them into zeros. So -inf alone
counts only in the output of a module with parameters, never in a batch, a buffer or the output of
another module.

**Float8 layers.** A cast makes no inf or NaN of finite values, but a loaded or written scale may be
NaN, inf or 0, a product that the formats represent may be too large for float16, and an infinite
element makes a dynamic scale infinite and every product with it NaN. So the model runs under
`float8.inspect`, and a finding in a float8 layer has the report of its casts: amaxes, scales, and
what saturates, which makes nothing infinite but tells of an outdated scale.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.linear.casts import DelayedCast
from float8.numerics import passes
from float8.numerics.inspection import has_float8, inspect, without_wrappers
from float8.numerics.snapshot import Report
from float8.tensor import Float8Tensor


@dataclass(frozen=True)
class Finding:
    """The first tensor of a model that is not finite.

    Attributes:
        module: the name of the module that made it; "" is the model itself.
        module_type: the name of its type.
        tensor: which: "output", "input of NAME", "parameter weight", "gradient of its input", ...
        phase: "before" the run, "forward" or "backward".
        shape: of the tensor.
        dtype: of the tensor.
        elements: how many it has.
        nan: how many of them are NaN.
        inf: how many of them are inf or -inf.
        first: the index of the first that is not finite.
        amax: the largest finite magnitude.
        went_in: the tensors that it was made of: name -> amax, inf or NaN where that is not finite.
        after: the last finite tensor before it.
        remarks: further information, such as the casts of a float8 layer, as in a `Report`.
        led_to: where NaN followed, if this is an inf that became one.
    """

    module: str
    module_type: str
    tensor: str
    phase: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    nan: int
    inf: int
    first: tuple[int, ...]
    amax: float
    went_in: dict[str, float] = field(default_factory=dict)
    after: str | None = None
    remarks: tuple[str, ...] = ()
    led_to: str | None = None

    @property
    def where(self) -> str:
        """Module and tensor, in words."""
        return f"{self.module or 'the model'} ({self.module_type}): {self.tensor}"

    def __str__(self) -> str:
        counts = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "inf")) if n]
        when = "before the run" if self.phase == "before" else f"in the {self.phase}"
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{self.where}, {when}: {' and '.join(counts)} of {self.elements} elements, first at "
            f"{self.first}; {dtype} {list(self.shape)}, largest finite {self.amax:.4g}"
        ]
        if self.went_in:
            amaxes = ", ".join(f"{name} {amax:.4g}" for name, amax in self.went_in.items())
            lines.append(f"  made of (amax): {amaxes}")
        if self.after is not None:
            lines.append(f"  last seen, and finite: {self.after}")
        lines += [f"  {remark}" for remark in self.remarks]
        if self.led_to is not None:
            lines.append(f"  led to NaN or inf at {self.led_to}")
        return "\n".join(lines)


def find_nan(
    model: nn.Module, batch: Any, *, loss_fn: passes.LossFn | None = None, seed: int = 0
) -> Finding | None:
    """Run a model forward and backward, and name the first tensor that is not finite.

    For converted models and plain ones. Nothing of the model changes: gradients, buffers, random
    states, modes and hooks are as before, also when it raises. Under
    ``float8.high_precision(model)`` the same call tells whether float8 is the cause.

    Every tensor that enters or leaves a module is read once, and the host waits for the device each
    time. A compiled model runs eagerly. Under DDP or FSDP every rank has to call it, and reports on
    its own batch and shards.

    Args:
        model: runs in the mode that it is in.
        batch: the model is called as ``model(**batch)`` with a mapping, ``model(*batch)`` with a
            tuple or a list, and ``model(batch)`` with anything else.
        loss_fn: of the model's output; a scalar, where backward starts. By default that is
            ``output.loss`` or ``output["loss"]``, or the output if it is a scalar, or else its
            first floating point tensor times a random cotangent.
        seed: of dropout, and of the cotangent where there is no loss.

    Returns:
        the finding, to print; None if nothing counts. A NaN always counts. An inf counts in a
        parameter, the loss or a parameter's gradient, or if the run ends with one; attention masks
        of -inf do not.

    Raises:
        TypeError: ``model`` is no module, or ``loss_fn`` no function.
    """
    passes.check_run(model, loss_fn, "find_nan")
    search, modules = _Search(model), dict(model.named_modules())
    inspected = inspect(model) if has_float8(model) else nullcontext(Report())
    with passes.model_unchanged(model), inspected as report:
        search.look_before(batch)
        try:
            with passes.watched(modules, search.leave, search.enter):
                see_loss = None if loss_fn is None else partial(search.see_loss, loss_fn)
                found = passes.run_pass(model, batch, see_loss, seed)
            search.look_after(found.gradients)
        except Exception:  # what a NaN has led to, as in an index; or the user's own
            if search.found is None:
                raise
    if search.found is None or search.found.phase == "before":
        return search.found
    name = without_wrappers(search.found.module)
    casts = [cast for cast in report.casts if without_wrappers(cast.layer) == name]
    lines = Report(casts).table().splitlines() if casts else []
    return replace(search.found, remarks=(*search.found.remarks, *lines))


Kinds = tuple[str, ...]  # what `_kind` returns
NAN, ANY = ("nan",), ("nan", "inf", "mask")


class _Call(NamedTuple):
    """A module that is running, the tensors that it reads, and what was finite before."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    after: str | None = None


class _Search:
    """The state of one `find_nan`.

    Attributes:
        found: the finding.
        first_inf: an inf that becomes the finding if it led to one, or None.
        inf_came_in: whether +inf came with the batch or a buffer.
        last_gradient: the last finite gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[_Call] = []
        self.first_inf: Finding | None = None
        self.found: Finding | None = None
        self.inf_came_in = False
        self.last_gradient: str | None = None

    def see(
        self,
        call: _Call,
        what: str,
        phase: str,
        value: Tensor,
        counts: Kinds = NAN,
        remembers: Kinds = (),
        remark: str = "",
    ) -> str | None:
        """Look at a tensor, and return its `_kind`.

        If that is in ``counts``, this is the finding, or what an earlier inf led to. If it is in
        ``remembers``, it may be such an inf.
        """
        kind = _kind(value) if self.found is None else None
        if kind in counts or (kind in remembers and self.first_inf is None):
            finding = _finding(call, what, phase, value, remark)
            if kind not in counts:
                self.first_inf = finding
            elif self.first_inf is None:
                self.found = finding
            else:
                self.found = replace(self.first_inf, led_to=f"{finding.where} in the {phase}")
        return kind

    def look_before(self, batch: Any) -> None:
        """Look at the batch, parameters and buffers."""
        for i, value in enumerate(passes.tensors_of(batch)):
            kind = self.see(_Call("", self.model, {}), f"tensor {i} of the batch", "before", value)
            self.inf_came_in |= kind == "inf"
        for name, module in self.model.named_modules():
            call, is_cast = _Call(name, module, {}), isinstance(module, DelayedCast)
            for key, parameter in _parameters(module).items():
                self.see(call, f"parameter {key}", "before", parameter, ANY)
            for key, buffer in module._buffers.items():
                if buffer is not None and not (is_cast and key in _RECORDS):
                    remembers = ANY if is_cast else ("nan",)
                    kind = self.see(call, f"buffer {key}", "before", buffer, (), remembers)
                    self.inf_came_in |= kind == "inf"

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Look at the arguments of a module, which the module around it made."""
        if passes.in_forward():
            named = [(f"input {i}", t) for i, t in enumerate(passes.tensors_of(args))]
            named += [(key, t) for key, value in kwargs.items() for t in passes.tensors_of(value)]
            inputs = {key: t for key, t in named if _is_float(t)}
            for value in inputs.values() if self.calls else ():
                remembers = () if self.inf_came_in else ("inf",)
                self.see(self.calls[-1], f"input of {name}", "forward", value, NAN, remembers)
            self.calls.append(_Call(name, module, inputs))
        # A module that works in place has to write to its argument, not to an alias.
        if getattr(module, "inplace", False):
            return None
        see = partial(self.see_gradient, "gradient of its input", name, module)
        return passes.with_gradient_hooks(args, kwargs, see)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Look at the output of a module; the result looks at its gradient."""
        # The modules differ if a hook of the user's raised before `enter`.
        if passes.in_forward() and self.calls and self.calls[-1].module is module:
            call, parameters = self.calls.pop(), _parameters(module)
            counts: Kinds = NAN
            remembers: Kinds = ("inf", "mask") if parameters else ("inf",)
            if not self.calls:  # the output of the model
                counts = ("nan", "inf") if self.first_inf is None else ANY
            if self.first_inf or any(_kind(t) for t in call.inputs.values()):
                remembers = ()
            call = call._replace(inputs=call.inputs | parameters)
            values = [t for t in passes.tensors_of(output) if _is_float(t)]
            for value in values:
                self.see(call, "output", "forward", value, counts, remembers)
            if self.calls and values:
                self.calls[-1] = self.calls[-1]._replace(after=f"{name}: output")
        return partial(self.see_gradient, _GRAD_OUTPUT, name, module)

    def see_loss(self, loss_fn: passes.LossFn, output: Any) -> Tensor:
        """Look at the value of a loss function, which is the result."""
        floats = [t for t in passes.tensors_of(output) if _is_float(t)]
        outputs = {f"output {i}": t for i, t in enumerate(floats)}
        loss = loss_fn(output)
        self.see(_Call("", self.model, outputs), "loss", "forward", loss, ANY)
        return loss

    def look_after(self, gradients: dict[Any, Tensor]) -> None:
        """Look at the gradients of the parameters, by their ids."""
        for name, module in self.model.named_modules():
            for key, parameter in _parameters(module).items():
                if (gradient := gradients.get(id(parameter))) is not None:
                    self.see_gradient(f"gradient of {key}", name, module, gradient, ANY)

    def see_gradient(
        self, what: str, name: str, module: nn.Module, gradient: Tensor, counts: Kinds = NAN
    ) -> None:
        """Look at a gradient."""
        came_in = what == _GRAD_OUTPUT
        inputs, remark = ({}, _ARRIVED) if came_in else (_parameters(module), "")
        call = _Call(name, module, inputs, self.last_gradient)
        if self.see(call, what, "backward", gradient, counts, ANY, remark) is None:
            self.last_gradient = f"{name}: {what}" if name else what


_GRAD_OUTPUT = "gradient of its output"
_ARRIVED = "it came in: made by what reads this output in the forward, or by the loss"
# What delayed casts record and `sync` reads: no forward multiplies by it.
_RECORDS = "amax_history", "current_amax"


def _finding(call: _Call, what: str, phase: str, value: Tensor, remark: str) -> Finding:
    """The `Finding` of a value that is not finite, with its numbers counted."""
    x = _plain(value)
    bad, nan = ~x.isfinite(), int(x.isnan().sum())
    inf = int(bad.sum()) - nan
    overflows = "float16 ends at 65504: larger values become inf"
    remarks = (remark, overflows if x.dtype == torch.float16 and inf else "")
    return Finding(
        *(call.name, type(call.module).__name__, what, phase, tuple(x.shape), value.dtype),
        *(x.numel(), nan, inf, tuple(bad.nonzero()[0].tolist()), _amax(x[~bad])),
        went_in={name: _amax(tensor) for name, tensor in call.inputs.items()},
        after=call.after,
        remarks=tuple(filter(None, remarks)),
    )


def _amax(value: Tensor) -> float:
    """The largest magnitude, NaN if there is one; 0 of an empty tensor."""
    x = _plain(value)
    return float(x.abs().max()) if x.numel() else 0.0


def _plain(value: Tensor) -> Tensor:
    """A tensor without float8, graph and other ranks' shards."""
    value = passes.local_part(value.detach())
    return value.dequantize() if isinstance(value, Float8Tensor) else value


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize > 1


def _kind(value: Tensor) -> str | None:
    """None where all is finite, "nan", "inf", or "mask" where -inf is all that is not finite."""
    if not _is_float(value) or bool((x := _plain(value)).isfinite().all()):
        return None
    if bool(x.isnan().any()):
        return "nan"
    return "inf" if bool((x == torch.inf).any()) else "mask"


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {key: p for key, p in module._parameters.items() if p is not None}
