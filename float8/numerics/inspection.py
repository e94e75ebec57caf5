"""`inspect`: watch what casts do to a model's operands, while it runs as it always does.

::

    with inspect(model) as report:
        loss(model(x), y).backward()
    print(report.table())

Hooks on every `Float8Linear` see its input, its weight as the layer sees it (gathered by FSDP2, in
the dtype that autocast asks for), and the gradient of what it returned. Each is cast once more,
exactly as the layer casts it (`linear.scaling.quantize` with its `OperandCast` and the scale that a
delayed cast has), nothing is recorded, and `float8.numerics.statistics` compares. What the model
computes stays the same to the bit: outputs, gradients, amax histories, random numbers.

Numbers gather on the device over calls, microbatches and layers that are called twice. They come to
the host when the block ends.

- Recomputation (activation checkpointing) counts nothing again.
- Without gradients, in evaluation, there are forward rows alone.
- An operand that arrives in float8 (fused norms, weights that FSDP2 gathered so) has no
  high-precision twin: its rows have no SQNR.
- Under data or tensor parallelism a report is of this rank's part of the work; `Report.gather`
  joins them. Tensor-parallel ranks must all inspect, since they agree on scales.
- Under ``torch.compile`` the model runs eagerly while it is watched, and so does every other
  compiled function (``torch.compiler.set_stance("force_eager")``): compiled graphs do not call
  hooks that came after them. Afterwards the same graphs run again. Where a whole training step is
  compiled, open the block around its call, not in it.
- Layers have the names that they have in the model itself, without those of `torch.compile`, DDP,
  FSDP1 and ``checkpoint_wrapper`` around it.

A layer of which nothing was seen is named in ``report.skipped``, with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from float8.arguments import check_module
from float8.config import LinearPlan, OperandCast, ScalingType
from float8.formats import FORMATS
from float8.granularity import WHOLE, Block
from float8.kernels import is_sharded
from float8.linear.autograd import as_matrix, autocasts, compute_dtype
from float8.linear.bound_plan import plan_on
from float8.linear.float8_weight import float8_weight, is_resident
from float8.linear.layer import Float8Linear
from float8.linear.scaling import DelayedState, quantize
from float8.numerics.rows import OPERANDS
from float8.numerics.snapshot import Report
from float8.numerics.statistics import Coded, Measured, Tally, measure, rows_of
from float8.tensor import Float8Tensor

GEMMS = ("output", "grad_input", "grad_weight")


@contextmanager
def inspect(model: nn.Module, step: int | None = None) -> Iterator[Report]:
    """Watch the casts of a model's float8 layers, for as long as the block is open.

    Args:
        model: converted by `convert_to_float8_training` or for inference; compiled, wrapped in DDP,
            FSDP2 and the like or not.
        step: of the training, for the report.

    Yields:
        the report, which is complete when the block has ended, also by an exception.

    Raises:
        ValueError: the model has no float8 layer.
        TypeError: ``model`` is no module.
        RuntimeError: it is opened in a compiled function.
    """
    check_module(model, "inspect")
    model = _unwrapped(model)
    layers = {
        name_in_model(fqn): module
        for fqn, module in model.named_modules()
        if isinstance(module, Float8Linear)
    }
    if not layers:
        raise ValueError(
            f"inspect: {type(model).__name__} has no float8 layer; convert it first, as "
            "convert_to_float8_training(model), and inspect what that returns"
        )
    report = Report(model=type(model).__name__, step=step)
    watch = _Watch(layers)
    with ExitStack() as stack:
        stack.callback(watch.close, report)
        stack.enter_context(_EAGERLY)
        for fqn, layer in layers.items():
            # First of its hooks: others may replace what the layer returns, or free its weight.
            hook = _Hook(watch, fqn)
            handle = layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        yield report


# Of torch.compile, FSDP1, checkpoint_wrapper and Lightning's Fabric.
_WRAPPERS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
}


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner = getattr(inner, "_orig_mod", inner)
        inner = getattr(inner, "_forward_module", inner)  # Fabric's, with DDP inside
        if inner is model:
            return model
        model = inner


def name_in_model(fqn: str) -> str:
    """A name without what wrappers have put in it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


class _Eagerly:
    """Compiled functions run eagerly from the first opening to the last closing.

    Whatever the order: callbacks close in the one in which they opened, and a stance that is put
    back then is the other's.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened = 0
        self.stance: Any = None

    def __enter__(self) -> None:
        with self.lock:
            if not self.opened:
                try:
                    # Imports dynamo, as any optimizer does.
                    self.stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    raise RuntimeError(_IN_COMPILED) from error
            self.opened += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.opened -= 1
            if not self.opened:
                self.stance.__exit__(*error)


_EAGERLY = _Eagerly()
_IN_COMPILED = (
    "inspect: opened in a compiled function, whose model it cannot watch; open it around the call "
    "of that function"
)


class _Hook:
    """The forward hook of one layer. In a copy or a pickle of the model it sees nothing."""

    def __init__(self, watch: _Watch, fqn: str) -> None:
        self.watch, self.fqn = watch, fqn

    def __call__(
        self, layer: Float8Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        self.watch.see_call(self.fqn, layer, args[0] if args else kwargs["input"], output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Blind, ()


class _Blind:
    def __call__(self, *call: object) -> None:
        pass


class _Use(NamedTuple):
    """One cast of one operand: for which product, how, and whether of its transpose."""

    gemm: str
    cast: OperandCast
    is_transposed: bool = False


Key = tuple[str, str, str, bool]  # the last: whether the operand came in high precision
Found = tuple[Key, Tally, Measured]


class _Watch:
    """What is seen between the opening and the closing of a report."""

    def __init__(self, layers: dict[str, Float8Linear]) -> None:
        self.layers = layers
        self.tallies: dict[Key, Tally] = {}
        self.seen: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.is_open = True

    def see_call(self, fqn: str, layer: Float8Linear, input: Tensor, output: Tensor) -> None:
        if (reason := _why_not(layer, input)) is not None:
            self.reasons[fqn] = reason
            return
        self.seen.add(fqn)
        needs_x, needs_w, dtype = (
            input.requires_grad,
            layer.weight.requires_grad,
            compute_dtype(input),
        )
        with _beside_the_model(input):
            x, weight, states = layer.local_operands(input)
            operands = {"input": (x, states[0]), "weight": (weight, states[1])}
            now, later = _uses_in_forward(layer.config.plan, needs_x, needs_w)
            if torch._C._current_graph_task_id() == -1:  # else it is recomputed in a backward
                self.take([self.look(fqn, layer, op, use, *operands[op], dtype) for op, use in now])
            if not output.requires_grad:
                return
            # Kept until the gradient comes: of a forward that is thrown away it never does.
            kept = [self.look(fqn, layer, op, use, *operands[op], dtype) for op, use in later]
            fold = _folded_into_gradient(layer, dtype)
        uses = _uses_of_gradient(layer.config.plan, needs_x, needs_w)

        def on_gradient(grad_output: Tensor) -> None:
            if not self.is_open:
                return
            with _beside_the_model(grad_output):
                g = layer.local_grad_output(grad_output)
                g = g if fold is None else as_matrix(g) * fold
                seen = [self.look(fqn, layer, "grad_output", use, g, states[2]) for use in uses]
            self.take([*kept, *seen])

        output.register_hook(on_gradient)

    def look(
        self,
        fqn: str,
        layer: Float8Linear,
        operand: str,
        use: _Use,
        x: Tensor,
        state: DelayedState | None,
        dtype: torch.dtype | None = None,
    ) -> Found:
        """Cast an operand as the layer does, and measure that."""
        if isinstance(x, Float8Tensor):
            coded = _coded(x)
            key = (fqn, operand, use.gemm, False)
            fmt, kind = FORMATS[coded.data.dtype].name, _granularity(coded.block)
            return key, Tally(*key[:3], fmt, "float8", kind, False, False), measure(None, coded)
        x = as_matrix(x)
        x = x if dtype is None else x.to(dtype)
        x = x.t() if use.is_transposed else x
        how, emulate = use.cast, layer.config.emulate
        coded = Coded(*quantize(x, how, state, emulate=emulate), how.block)
        key = (fqn, operand, use.gemm, True)
        is_fixed = how.scaling_type is not ScalingType.DYNAMIC
        fmt, kind = FORMATS[coded.data.dtype].name, _granularity(how.block)
        tally = Tally(*key[:3], fmt, how.scaling_type.value, kind, True, is_fixed)
        return key, tally, measure(*_local(x, coded), may_saturate=is_fixed)

    def take(self, found: list[Found]) -> None:
        for key, tally, measured in found:
            self.tallies.setdefault(key, tally).add(measured)

    def close(self, report: Report) -> None:
        self.is_open = False
        places = {fqn: i for i, fqn in enumerate(self.layers)}

        def place(key: Key) -> tuple[int, int, int]:
            return places[key[0]], OPERANDS.index(key[1]), GEMMS.index(key[2])

        rows = rows_of([self.tallies[key] for key in sorted(self.tallies, key=place)])
        unseen = [fqn for fqn in self.layers if fqn not in self.seen]
        report.fill(rows, {fqn: self.reasons.get(fqn, "it was not called") for fqn in unseen})


def _why_not(layer: Float8Linear, input: Tensor) -> str | None:
    """The reason why nothing can be said of a call, or None."""
    from torch._subclasses.fake_tensor import is_fake

    if layer.high_precision:
        return "it ran in high precision: float8.high_precision(model), or an evaluation"
    if input.is_meta or layer.weight.is_meta or is_fake(input):
        return "it ran on meta or fake tensors, which have no values"
    plan = layer.config.plan
    if not any((plan.output.a, plan.grad_input.a, plan.grad_weight.a)):
        return "its config casts nothing"
    return None


@contextmanager
def _beside_the_model(x: Tensor) -> Iterator[None]:
    """Leave no trace in what the model computes, nor in what modes around it have seen."""
    kind = x.device.type
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if autocasts(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_disable_current_modes())  # selective checkpointing counts operations
        yield


def _uses_in_forward(
    plan: LinearPlan, needs_x: bool, needs_w: bool
) -> tuple[list[tuple[str, _Use]], list[tuple[str, _Use]]]:
    """The casts of input and weight: the first uses, and those which only a backward reads."""
    now, later = [], []
    if plan.output.a is not None and plan.output.b is not None:
        now = [("input", _Use("output", plan.output.a)), ("weight", _Use("output", plan.output.b))]
    if needs_w and plan.grad_weight.b is not None and not plan.reuses_input:
        later.append(("input", _Use("grad_weight", plan.grad_weight.b, True)))
    if needs_x and plan.grad_input.b is not None and not plan.reuses_weight:
        later.append(("weight", _Use("grad_input", plan.grad_input.b, True)))
    return now, later


def _uses_of_gradient(plan: LinearPlan, needs_x: bool, needs_w: bool) -> list[_Use]:
    uses = []
    if needs_x and plan.grad_input.a is not None:
        uses.append(_Use("grad_input", plan.grad_input.a))
    if needs_w and plan.grad_weight.a is not None and not (uses and plan.reuses_grad_output):
        uses.append(_Use("grad_weight", plan.grad_weight.a, True))
    return uses


def _folded_into_gradient(layer: Float8Linear, dtype: torch.dtype) -> Tensor | None:
    """The scales of a resident weight that multiply the gradient before its cast, if any do."""
    if not is_resident(layer.weight):
        return None
    weight = float8_weight(layer, plan_on(layer.config, layer.weight.device, dtype))
    return weight.transposed[1] if weight is not None and weight.scales_grad else None


def _coded(x: Float8Tensor) -> Coded:
    """The parts of a tensor in float8 as those of a matrix, leading dimensions flattened."""
    block = x._block if x.dim() > 1 else (WHOLE, *x._block)
    return Coded(as_matrix(x._data), as_matrix(x._scale), block[-2:])


def _local(x: Tensor, coded: Coded) -> tuple[Tensor, Coded]:
    """This rank's part of a cast of a DTensor, with the scales of that part."""
    if not is_sharded(x):
        return x, coded
    from torch.distributed.tensor import Replicate, Shard

    whole, data, scale = (cast(Any, part) for part in (x, coded.data, coded.scale))
    dims = [p.dim if p.is_shard() else None for p in whole.placements]
    placements = [Replicate() if d is None or scale.shape[d] == 1 else Shard(d) for d in dims]
    local_scale = scale.redistribute(placements=placements).to_local()
    return whole.to_local(), Coded(data.to_local(), local_scale, coded.block)


def _granularity(block: Block) -> str:
    if block == (WHOLE, WHOLE):
        return "tensorwise"
    if block == (1, WHOLE):
        return "rowwise"
    return "x".join("all" if extent == WHOLE else str(extent) for extent in block)
