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

**Float8 layers.** A `Float8Linear` makes inf or NaN of finite operands in few ways, and
`remarks_of` checks each. A loaded or written scale may be NaN, inf or 0. A product that the formats
represent may be too large for float16. An infinite element makes a dynamic scale infinite and every
product with it NaN; under a given scale the element becomes NaN. Saturation is reported too: it
makes nothing infinite, but an outdated scale is often an earlier cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import ScalingType
from float8.formats import on_device
from float8.linear.delayed import DelayedCast
from float8.linear.layer import Float8Linear
from float8.linear.scaling import Cast
from float8.numerics.passes import (
    LossFn,
    Watcher,
    check_run,
    has_other_ranks,
    local_part,
    model_unchanged,
    own_batch,
    run_model,
    seed_everything,
    start_of_backward,
    tensors_of,
    watched,
)
from float8.numerics.statistics import OPERANDS
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
        remarks: further information, such as the scales of a float8 layer.
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

    def that_led_to(self, other: Finding) -> Finding:
        """This one, as the origin of another."""
        return replace(self, led_to=f"{other.where} in the {other.phase}")

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
    model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None, seed: int = 0
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
    check_run(model, loss_fn, "find_nan")
    with model_unchanged(model):
        search = _Search(model)
        with suppress(_Stop):
            search.look_before(batch)
            search.run(own_batch(batch), loss_fn, seed)
        return search.found


def finding_of(
    module: tuple[str, nn.Module],
    tensor: str,
    phase: str,
    value: Tensor,
    went_in: Mapping[str, Tensor] | None = None,
    after: str | None = None,
    remarks: tuple[str, ...] = (),
) -> Finding:
    """The `Finding` of a value that is not finite, with its numbers counted."""
    x = _plain(value)
    bad = ~x.isfinite()
    nan = int(x.isnan().sum())
    if x.dtype == torch.float16 and nan < int(bad.sum()):
        remarks = (*remarks, "float16 ends at 65504: larger values become inf")
    return Finding(
        module[0],
        type(module[1]).__name__,
        tensor,
        phase,
        tuple(x.shape),
        value.dtype,
        x.numel(),
        nan,
        int(bad.sum()) - nan,
        tuple(bad.nonzero()[0].tolist()),
        amax_of(torch.where(bad, 0.0, x)),
        {name: amax_of(tensor) for name, tensor in (went_in or {}).items()},
        after,
        remarks,
    )


def amax_of(value: Tensor) -> float:
    """The largest magnitude, NaN if there is one; 0 of an empty tensor."""
    x = _plain(value)
    return float(x.abs().max()) if x.numel() else 0.0


def _plain(value: Tensor) -> Tensor:
    """A tensor without float8, graph and other ranks' shards."""
    value = local_part(value.detach())
    return value.dequantize() if isinstance(value, Float8Tensor) else value


# --- remarks on a float8 layer


def remarks_of(
    module: nn.Module, input: Any = None, grad_output: Tensor | None = None
) -> tuple[str, ...]:
    """The amaxes and scales of a float8 layer's operands; nothing for other modules."""
    if not isinstance(module, Float8Linear) or module.high_precision:
        return ()
    values = (input, module.weight, grad_output)
    return tuple(
        remark
        for name, cast, value in zip(OPERANDS, module.casts, values, strict=True)
        if isinstance(value, Tensor) and (remark := _remark(name, cast, value)) is not None
    )


def _remark(name: str, cast: Cast, value: Tensor) -> str | None:
    is_shard = local_part(value) is not value  # the scale is that of the whole tensor
    if cast.config.scaling_type is ScalingType.DISABLED or is_shard:
        return None
    fmt, kind = on_device(cast.format, value.device), cast.config.scaling_type.value
    is_delayed = isinstance(cast, DelayedCast) and cast.history_ready
    if isinstance(value, Float8Tensor):
        scale = value.scale.detach()
    elif isinstance(cast, DelayedCast) and is_delayed:
        scale = cast.scale.detach()
    elif cast.config.scaling_type is ScalingType.STATIC:
        scale = torch.tensor(cast.config.static_scale)
    else:
        kind = "dynamic (no history yet)" if kind == "delayed" else kind
        amaxes = kernels.amax(value.detach(), cast.config.granularity.block_of(value.shape))
        scale = kernels.scale_from_amax(amaxes, fmt.max, cast.config.scale_format.value)
    low, high, amax = float(scale.double().min()), float(scale.double().max()), amax_of(value)
    text = f"{name}: amax {amax:.4g}, {kind} {fmt} scale {low:.4g}"
    text += "" if low == high else f" to {high:.4g}"
    if not math.isfinite(amax):
        return f"{text}: not finite before its cast"
    if not (math.isfinite(low) and math.isfinite(high) and low > 0):
        return f"{text}: the scale itself is not finite and > 0"
    saturated = float((_plain(value).abs().double() > fmt.max * high).double().mean())
    return f"{text}: {saturated:.2%} saturated" if saturated else text


# --- the search


class _Stop(Exception):
    """Ends a forward at its first NaN."""


@dataclass
class _Call:
    """A module that is running."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    after: str | None = None  # the last finite output inside it


class _Search(Watcher):
    """The state of one `find_nan`.

    Attributes:
        found: the finding.
        first_inf: an inf that becomes the finding if it led to one, or None.
        inf_came_in: whether +inf came with the batch or a buffer.
        last_gradient: the last finite gradient.
        grad_outputs: of the float8 layers that backward reached last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[_Call] = []
        self.may_stop = not has_other_ranks()
        self.first_inf: Finding | None = None
        self.found: Finding | None = None
        self.inf_came_in = False
        self.last_gradient: str | None = None
        self.grad_outputs: dict[str, Tensor] = {}

    def conclude(self, finding: Finding) -> None:
        """Take a tensor that counts, or the inf that led to it, as the result."""
        if self.found is None:
            self.found = self.first_inf.that_led_to(finding) if self.first_inf else finding
        if finding.phase != "backward" and self.may_stop:
            raise _Stop

    def take(self, finding: Finding, kind: str) -> None:
        """Conclude with a NaN; remember the first inf, which may be harmless."""
        if kind == "nan":
            self.conclude(finding)
        self.first_inf = self.first_inf or finding

    def look_before(self, batch: Any) -> None:
        """Look at the batch, parameters and buffers."""
        for i, value in enumerate(tensors_of(batch)):
            kind = _kind(value)
            if kind == "nan":
                what = f"tensor {i} of the batch"
                self.conclude(finding_of(("", self.model), what, "before", value))
            self.inf_came_in |= kind == "inf"
        for name, module in self.model.named_modules():
            for key, parameter in _parameters(module).items():
                if _kind(parameter) is not None:
                    what = f"parameter {key}"
                    self.conclude(finding_of((name, module), what, "before", parameter))
            records = _RECORDS if isinstance(module, DelayedCast) else ()
            for key, buffer in module._buffers.items():
                kind = None if buffer is None or key in records else _kind(buffer)
                if buffer is not None and (kind == "nan" or (kind is not None and records)):
                    finding = finding_of((name, module), f"buffer {key}", "before", buffer)
                    self.first_inf = self.first_inf or finding
                self.inf_came_in |= kind == "inf"

    def run(self, batch: Any, loss_fn: LossFn | None, seed: int) -> None:
        """Run forward, loss and backward."""
        seed_everything(seed, self.model)
        root = ("", self.model)
        with ExitStack() as stack:
            stack.enter_context(watched(dict(self.model.named_modules()), self))
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    see = partial(self._see_parameter_gradient, name)
                    stack.callback(parameter.register_hook(see).remove)
            output = run_model(self.model, batch)
            for value in tensors_of(output):
                kind = _kind(value)
                if kind == "inf" or (kind is not None and self.first_inf is not None):
                    self.conclude(finding_of(root, "output", "forward", value))
            start, cotangent = start_of_backward(output, loss_fn, seed)
            if cotangent is None and _kind(start) is not None:
                values = enumerate(tensors_of(output))
                went_in = {f"output {i}": t for i, t in values if _is_float(t)}
                self.conclude(finding_of(root, "loss", "forward", start, went_in))
            if start.requires_grad:
                start.backward(cotangent)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:  # also of sharded parameters, whose hooks do not run
                self._see_parameter_gradient(name, parameter.grad)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        named = [(f"input {i}", t) for i, t in enumerate(tensors_of(args))]
        named += [(key, t) for key, value in kwargs.items() for t in tensors_of(value)]
        inputs = {key: t for key, t in named if _is_float(t)}
        around, is_inside = (self.calls or [_Call("", module, {})])[-1], bool(self.calls)
        self.calls.append(_Call(name, module, inputs))
        for value in inputs.values() if is_inside and self.found is None else ():
            kind = _kind(value)  # the module around it made it
            if kind == "nan" or (kind == "inf" and not (self.first_inf or self.inf_came_in)):
                what, at = f"input of {name}", (around.name, around.module)
                self.take(finding_of(at, what, "forward", value, around.inputs, around.after), kind)

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        # The modules differ if a hook of the user's raised before `enter`.
        if not self.calls or self.calls[-1].module is not module:
            return
        call = self.calls.pop()
        values = [t for t in tensors_of(output) if _is_float(t)]
        for value in values if self.found is None else ():
            self._look_at_output(call, value)
        if self.calls and values:
            self.calls[-1].after = f"{name}: output"

    def _look_at_output(self, call: _Call, value: Tensor) -> None:
        kind, parameters = _kind(value), _parameters(call.module)
        if kind is None or (kind == "mask" and not parameters):
            return
        came_in = any(_kind(t) is not None for t in call.inputs.values())
        if kind != "nan" and (came_in or self.first_inf is not None):
            return
        remarks = remarks_of(call.module, next(iter(call.inputs.values()), None))
        at, went_in = (call.name, call.module), call.inputs | parameters
        finding = finding_of(at, "output", "forward", value, went_in, call.after, remarks)
        self.take(finding, kind)

    def see_grad_output(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        is_finite = self._is_finite(name, module, _GRAD_OUTPUT, gradient, {})
        if is_finite and isinstance(module, Float8Linear):
            self.grad_outputs[name] = gradient.detach()
            for old in list(self.grad_outputs)[:-8]:  # the gradient of its input follows soon
                del self.grad_outputs[old]

    def see_grad_input(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        self._is_finite(name, module, "gradient of its input", gradient, _parameters(module))

    def _see_parameter_gradient(self, name: str, gradient: Tensor) -> None:
        owner, _, key = name.rpartition(".")
        module = self.model.get_submodule(owner)
        self._is_finite(owner, module, f"gradient of {key}", gradient, {}, counts=True)

    def _is_finite(
        self,
        name: str,
        module: nn.Module,
        what: str,
        gradient: Tensor,
        went_in: dict[str, Tensor],
        counts: bool = False,
    ) -> bool:
        """Look at a gradient; ``counts`` is whether an inf counts by itself."""
        if self.found is not None:
            return False
        kind = _kind(gradient)
        if kind is None:
            self.last_gradient = f"{name}: {what}" if name else what
            return True
        if (grad_output := self.grad_outputs.get(name)) is not None:
            went_in = {"grad_output": grad_output} | went_in
        remarks = remarks_of(module, None, grad_output)
        if what == _GRAD_OUTPUT:
            remarks = (_FIRST if self.last_gradient is None else _ARRIVED,)
        at, last = (name, module), self.last_gradient
        finding = finding_of(at, what, "backward", gradient, went_in, last, remarks)
        self.take(finding, "nan" if counts else kind)
        return False


_GRAD_OUTPUT = "gradient of its output"
_ARRIVED = "it came in: made by what reads this output, after the module in the forward"
_FIRST = "it came in before any other gradient: made by the loss, or by what reads this output"
# What delayed casts record and `sync` reads: no forward multiplies by it.
_RECORDS = "amax_history", "current_amax", "scale_age"


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize > 1


def _kind(value: Tensor) -> str | None:
    """None where all is finite, "nan", "inf", or "mask" where -inf is all that is not finite."""
    if not _is_float(value):
        return None
    x = _plain(value)
    if bool(x.isfinite().all()):
        return None
    if bool(x.isnan().any()):
        return "nan"
    return "inf" if bool((x == torch.inf).any()) else "mask"


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {key: p for key, p in module._parameters.items() if p is not None}
