"""`find_nan`: the first module and tensor of a model that went non-finite.

::

    print(find_nan(model, batch, loss_fn=lambda out: F.cross_entropy(out, y)))

The order in which it looks is the order in which things go wrong: the batch, parameters and scales;
then forward, where modules end inner before outer, so that the first output with a NaN is that of
the innermost module that made it; the loss; then backward, gradients in the order of their making.
What is made between modules (by functions in a forward) belongs to the module around them, and the
last of its modules that was finite is named.

What counts. A NaN always does; so does an inf in a parameter, in the loss or in a parameter's
gradient. An inf elsewhere counts if the run ends in one of those, or with an inf in its output: the
first place where it came out of finite tensors is then the origin, and is named in place of what
followed. An inf that comes to nothing is let be: attention masks are -inf, and softmax makes zeros
of them. So -inf alone is a fault only where a module multiplies by parameters, never in a batch, in
a buffer, or in what a module without parameters returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from float8.arguments import check_function, check_module
from float8.linear.delayed import DelayedCast
from float8.linear.layer import Float8Linear
from float8.numerics.batches import (
    LossFn,
    is_one_of_many,
    own_batch,
    run_model,
    start_of,
    tensors_of,
)
from float8.numerics.culprit import Finding, finding, plain, remarks_of
from float8.numerics.passes import tapped
from float8.numerics.untouched import seed_everything, untouched


def find_nan(
    model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None, seed: int = 0
) -> Finding | None:
    """Run a model forward and backward, and name the first tensor that is not finite.

    Converted models and plain ones. Nothing of the model changes: gradients, buffers, random
    states, modes and hooks are as before, also when it raises. To ask whether float8 is to blame,
    ask again under ``float8.high_precision(model)``.

    Every tensor that enters or leaves a module is read once, and a GPU is waited for each time. A
    compiled model runs eagerly. Under DDP or FSDP every rank has to call it; each reports what it
    found in its own batch and shards.

    Args:
        model: runs in the mode that it is in.
        batch: a mapping, tuple, list or single argument of the model; see
            `float8.numerics.batches` for what backward starts from.
        loss_fn: of the model's output; a scalar.
        seed: of dropout, and of the cotangent where there is no loss.

    Returns:
        What was found, to print; None if all of it is finite (see this file for what counts).

    Raises:
        TypeError: ``model`` is no module, or ``loss_fn`` no function.
    """
    check_module(model, "find_nan")
    if loss_fn is not None:
        check_function(loss_fn, "find_nan", "loss_fn")
    with untouched(model):
        search = _Search(model)
        try:
            search.before(batch)
            with search.watching():
                search.run(own_batch(batch), loss_fn, seed)
        except _Found:
            pass
        return search.found


class _Found(Exception):
    """Ends a forward: what follows the first NaN does not matter."""


@dataclass
class _Call:
    """A module that is running."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    after: str | None = None  # the last thing inside that was finite
    children: list[str] = field(default_factory=list)


class _Search:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.root = ("", model)
        self.calls: list[_Call] = []
        self.in_forward = True
        self.may_stop = not is_one_of_many()
        self.suspect: Finding | None = None
        self.found: Finding | None = None
        self.given_inf = False  # whether +inf came in from outside
        self.last: str | None = None  # the last gradient, which was finite
        self.grad_outputs: dict[str, Tensor] = {}  # of the layers that were reached last

    # --- verdicts

    def convict(self, fault: Finding) -> None:
        """A fault for certain: it, or the inf that was before it, is the finding."""
        if self.found is None:
            self.found = fault if self.suspect is None else self.suspect.that_led_to(fault)
        if self.in_forward and self.may_stop:
            raise _Found

    def note(self, fault: Finding) -> None:
        """An inf, which may come to nothing."""
        self.suspect = self.suspect or fault

    # --- before

    def before(self, batch: Any) -> None:
        """Look at what is there: the batch, parameters, buffers."""
        for i, value in enumerate(tensors_of(batch)):
            kind = _kind(value)
            if kind == "nan":
                self.convict(finding(self.root, f"tensor {i} of the batch", "before", value))
            self.given_inf |= kind == "inf"
        for name, module in self.model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and _kind(parameter) is not None:
                    what = f"parameter {key}"
                    self.convict(finding((name, module), what, "before", parameter))
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in _RECORDS.get(type(module), ()):
                    self._look_at_buffer((name, module), key, buffer)

    def _look_at_buffer(self, module: tuple[str, nn.Module], key: str, buffer: Tensor) -> None:
        kind = _kind(buffer)
        if kind == "nan" or (kind is not None and isinstance(module[1], DelayedCast)):
            self.note(finding(module, f"buffer {key}", "before", buffer))
        self.given_inf |= kind == "inf"

    # --- the run

    def run(self, batch: Any, loss_fn: LossFn | None, seed: int) -> None:
        """Forward, loss, backward."""
        seed_everything(seed, self.model)
        output = run_model(self.model, batch)
        for value in tensors_of(output):
            kind = _kind(value)
            if kind == "inf" or (kind is not None and self.suspect is not None):
                self.convict(finding(self.root, "output", "forward", value))
        start = start_of(output, loss_fn, seed)
        if start.cotangent is None and _kind(start.tensor) is not None:
            went_in = {f"output {i}": t for i, t in enumerate(tensors_of(output)) if _is_float(t)}
            self.convict(finding(self.root, "loss", "forward", start.tensor, went_in))
        self.in_forward = False
        start.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:  # what hooks do not reach, as of sharded parameters
                self._saw_parameter_gradient(name, parameter.grad)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on every module and parameter, for as long as it is open."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                before = partial(self._enter, name)
                after = partial(self._leave, name)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                # Always, as where a module raises and the one around it tries something else.
                handle = module.register_forward_hook(after, always_call=True)
                stack.callback(handle.remove)
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    saw = partial(self._saw_parameter_gradient, name)
                    stack.callback(parameter.register_hook(saw).remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.in_forward:  # else a recomputation, which may end before the module does
            named = [(f"input {i}", t) for i, t in enumerate(tensors_of(args))]
            named += [(key, t) for key, value in kwargs.items() for t in tensors_of(value)]
            inputs = {key: t for key, t in named if _is_float(t)}
            around = self.calls[-1] if self.calls else None
            self.calls.append(_Call(name, module, inputs))
            if around is not None and self.found is None:
                for value in inputs.values():
                    self._look_between(around, name, value)
        if getattr(module, "inplace", False):  # writes to what it is given, not to a view of it
            return None
        return tapped(args, kwargs, partial(self._saw_grad_input, name, module))

    def _look_between(self, around: _Call, name: str, value: Tensor) -> None:
        kind = _kind(value)
        if kind is None or kind == "mask" or (kind == "inf" and (self.suspect or self.given_inf)):
            return
        what, module = f"input of {name}", (around.name, around.module)
        fault = finding(module, what, "forward", value, around.inputs, around.after)
        if kind == "nan":
            self.convict(fault)
        self.note(fault)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        values = [t for t in tensors_of(output) if _is_float(t)]
        # A hook of the user's may have raised before `_enter`.
        if self.in_forward and self.calls and self.calls[-1].module is module:
            call = self.calls.pop()
            for value in values if self.found is None else ():
                self._look_at_output(call, value)
            if self.calls and values:
                self.calls[-1].after = f"{name}: output"
        for value in values:
            # A leaf would keep the hook; a parameter that a module returns has one of its own.
            if value.grad_fn is not None and torch.is_grad_enabled():
                value.register_hook(partial(self._saw_grad_output, name, module))

    def _look_at_output(self, call: _Call, value: Tensor) -> None:
        kind, module = _kind(value), call.module
        has_parameters = any(p is not None for p in module._parameters.values())
        if kind is None or (kind == "mask" and not has_parameters):
            return
        came_in = any(_kind(t) is not None for t in call.inputs.values())
        if kind != "nan" and (came_in or self.suspect is not None):
            return
        went_in = call.inputs | _parameters(module)
        remarks = remarks_of(module, next(iter(call.inputs.values()), None))
        at = (call.name, module)
        fault = finding(at, "output", "forward", value, went_in, call.after, remarks)
        if kind == "nan":
            self.convict(fault)
        self.note(fault)

    # --- backward

    def _saw_grad_output(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        if not self._is_finite(name, module, _GRAD_OUTPUT, gradient, {}):
            return
        if isinstance(module, Float8Linear):
            self.grad_outputs[name] = gradient.detach()
            for old in list(self.grad_outputs)[:-8]:  # one layer's input is reached soon after it
                del self.grad_outputs[old]

    def _saw_grad_input(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        self._is_finite(name, module, "gradient of its input", gradient, _parameters(module))

    def _saw_parameter_gradient(self, name: str, gradient: Tensor) -> None:
        owner, _, key = name.rpartition(".")
        module = self.model.get_submodule(owner)
        self._is_finite(owner, module, f"gradient of {key}", gradient, {}, certain=True)

    def _is_finite(
        self,
        name: str,
        module: nn.Module,
        what: str,
        gradient: Tensor,
        went_in: dict[str, Tensor],
        certain: bool = False,
    ) -> bool:
        if self.found is not None:
            return False
        kind = _kind(gradient)
        if kind is None:
            self.last = f"{name}: {what}" if name else what
            return True
        if (grad_output := self.grad_outputs.get(name)) is not None:
            went_in = {"grad_output": grad_output} | went_in
        remarks = remarks_of(module, None, grad_output)
        if what == _GRAD_OUTPUT:
            remarks = (_ARRIVED if self.last is not None else _FIRST,)
        fault = finding((name, module), what, "backward", gradient, went_in, self.last, remarks)
        if kind == "nan" or certain:
            self.convict(fault)
        else:
            self.note(fault)
        return False


_GRAD_OUTPUT = "gradient of its output"
_ARRIVED = "it came in: made by what reads this output, after the module in the forward"
_FIRST = "it came in before any other gradient: made by the loss, or by what reads this output"
# What delayed casts record and `sync` reads: no forward multiplies by it.
_RECORDS: dict[type, tuple[str, ...]] = {DelayedCast: ("amax_history", "current_amax", "scale_age")}


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() and (value.dtype.itemsize > 1)


def _kind(value: Tensor) -> str | None:
    """None where all is finite, "nan", "inf", or "mask" where -inf is all that is not finite."""
    if not _is_float(value):
        return None
    x = plain(value)
    if bool(x.isfinite().all()):
        return None
    if bool(x.isnan().any()):
        return "nan"
    return "inf" if bool((x == torch.inf).any()) else "mask"


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {key: p for key, p in module._parameters.items() if p is not None}
