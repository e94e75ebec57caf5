"""`inspect`: measure the casts of a model's operands while it runs, without changing a result.

::

    with inspect(model) as report:
        loss(model(x), y).backward()
    print(report)

Hooks on every `Float8Linear` see its input, its weight as the layer sees it (gathered by FSDP2, in
the dtype that autocast asks for), and the gradient of its output. So does a watcher of every
product that the transform `float8.unit_scaling.transforms.float8` runs, named after its weight or,
where that is computed, numbered. Products that a forward does not reach are unknown to it.
Each operand is cast once more, exactly as the layer casts it: by `linear.scaling.bind_and_cast`
with the layer's `OperandCast` and the scale of a delayed cast. No amax is recorded.
`float8.numerics.statistics` compares the operand with its cast. Outputs, gradients, amax histories
and random numbers stay the same to the bit.

Numbers are accumulated on the device over calls, microbatches and layers that are called twice.
They are moved to the host when the block ends.

- Recomputation (activation checkpointing) counts nothing twice.
- Without gradients, as in evaluation, the report has the casts of the forward only.
- An operand that arrives in float8 (from fused norms, or gathered in float8 by FSDP2) has no
  high-precision values to compare with: its casts have no SQNR.
- The gradient's SQNR (`float8.numerics.gradient_error`) needs the input and the gradient of the
  same tokens: tensor-parallel layers that exchange tokens between ranks have none.
- Under data or tensor parallelism a report is of this rank's part of the work; `Report.gather`
  joins the parts. Tensor-parallel ranks must all inspect, because they agree on scales.
- Under ``torch.compile`` the model runs eagerly inside the block, and so does every other compiled
  function (``torch.compiler.set_stance("force_eager")``): compiled graphs do not call hooks that
  were added later. After the block the same graphs run again. Where a whole training step is
  compiled, open the block around its call, not in it.
- Layers have the names that they have in the model itself, without the prefixes of `torch.compile`,
  DDP, FSDP1 and ``checkpoint_wrapper``.

Layers that were not measured are in ``report.skipped``, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from float8.arguments import check_module
from float8.config import Float8LinearConfig, LinearPlan, OperandCast
from float8.experts.modules import Float8Experts
from float8.formats import FORMATS
from float8.granularity import WHOLE, block_name
from float8.kernels import is_sharded
from float8.linear.autograd import STATELESS, States, as_matrix
from float8.linear.float8_weight import by_scaled_gradient, float8_weight, is_resident
from float8.linear.layer import Float8Linear
from float8.linear.plan import autocasts, compute_dtype, plan_for
from float8.linear.scaling import DelayedState, bind_and_cast
from float8.linear.smoothing import inverse, smoothed, smoothing_factors, split
from float8.numerics.gradient_error import Products, contracted, energies, probes
from float8.numerics.snapshot import Report
from float8.numerics.statistics import (
    IN_FLOAT8,
    OPERANDS,
    SMOOTH,
    CastKey,
    CastLabels,
    CastTotals,
    Float8Matrix,
    measure_cast,
    statistics_of,
)
from float8.tensor import Float8Tensor

GEMMS = ("output", "grad_input", "grad_weight")


@contextmanager
def inspect(model: nn.Module, step: int | None = None) -> Iterator[Report]:
    """Measure the casts of a model's float8 layers while the block is open.

    Args:
        model: converted for training or for inference, or of `transforms.float8`; it may be
            compiled, or wrapped in DDP, FSDP2 and the like.
        step: of the training, for the report.

    Yields:
        the report, which is complete when the block has ended, also by an exception.

    Raises:
        ValueError: the model has no float8 layer, and no transform that runs products in float8.
        TypeError: ``model`` is no module.
    """
    check_module(model, "inspect")
    model = _unwrapped(model)
    named = [(name_in_model(fqn), module) for fqn, module in model.named_modules()]
    layers = {fqn: module for fqn, module in named if isinstance(module, Float8Linear)}
    experts = [fqn for fqn, m in named if isinstance(m, Float8Experts)]
    # Of the models that `float8.unit_scaling.transforms.float8` returns.
    found = ((fqn, getattr(module, "float8_products", None)) for fqn, module in named)
    transforms = {fqn: products for fqn, products in found if products is not None}
    if not (layers or experts or transforms):
        raise ValueError(
            f"inspect: {type(model).__name__} has no float8 layer; convert it first, as "
            "convert_to_float8_training(model), or a model of unit_scale by "
            "float8.unit_scaling.transforms.float8, and inspect what that returns, not a part of it"
        )
    report = Report(model=type(model).__name__, step=step)
    inspection = _Inspection(layers)
    inspection.skipped |= dict.fromkeys(experts, "the casts of experts are not watched")
    for fqn in transforms:
        inspection.skipped[fqn or report.model] = "none of its products ran in float8"
    with ExitStack() as stack:
        stack.callback(inspection.close, report)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for fqn, layer in layers.items():
            # The first of its hooks: others may replace the output, or free the weight.
            hook: Any = _Hook(inspection, fqn)
            handle = layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        for fqn, products in transforms.items():
            watcher = partial(_see_product, inspection, fqn, fqn or report.model)
            stack.enter_context(products.watched(watcher))
        yield report


# Of torch.compile, FSDP1, checkpoint_wrapper and Lightning's Fabric.
_WRAPPERS = {
    "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module",
}  # fmt: skip


def _unwrapped(model: nn.Module) -> nn.Module:
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    for name in ("_orig_mod", "_forward_module"):  # Fabric's, with DDP inside
        inner = getattr(inner, name, inner)
    return model if inner is model else _unwrapped(inner)


def name_in_model(fqn: str) -> str:
    """A module's name without the parts that wrappers add."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


class _Hook(NamedTuple):
    """The forward hook of one layer. Copies and pickles of the model get one that does nothing."""

    inspection: _Inspection | None = None
    fqn: str = ""

    def __call__(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self.inspection is not None:
            self.inspection.see_call(self.fqn, layer, args[0] if args else kwargs["input"], output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _see_product(
    inspection: _Inspection,
    owner: str,
    said: str,
    name: str,
    config: Float8LinearConfig,
    input: Tensor,
    weight: Tensor,
    output: Tensor,
) -> None:
    """See a product of a transformed module."""
    inspection.skipped.pop(said, None)
    fqn = name_in_model(".".join(part for part in (owner, name) if part))
    inspection.see_call(fqn, _Product(config, weight), input, output)


class _Product(NamedTuple):
    """A product that a transform runs: what `_Inspection` reads of a layer."""

    config: Float8LinearConfig
    weight: Tensor
    high_precision: bool = False  # a transform that is switched off calls no watcher

    def local_operands(self, input: Tensor) -> tuple[Tensor, Tensor, States]:
        return input, self.weight, STATELESS

    def local_factors(self, _: Tensor, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        factors_1K = smoothing_factors(x_MK)
        return factors_1K, factors_1K

    def local_grad_output(self, grad_output: Tensor) -> Tensor:
        return grad_output


_Layer = Float8Linear | _Product


class _Use(NamedTuple):
    """One cast of an operand: for which GEMM, how, and whether of the transpose."""

    operand: str
    gemm: str
    cast: OperandCast
    is_transposed: bool = False


class _Cast(NamedTuple):
    """An operand of a call, as its GEMM reads it: this rank's part, and its cast."""

    labels: CastLabels
    matrix: Float8Matrix
    is_transposed: bool

    def measured(self) -> tuple[CastLabels, CastTotals]:
        return self.labels, measure_cast(self.matrix)


_Found = tuple[CastLabels, CastTotals]
_Key = tuple[CastKey, bool]


def _key(labels: CastLabels) -> _Key:
    return labels[:3], labels.scaling == IN_FLOAT8


class _Inspection:
    """The numbers between the opening and the closing of a block."""

    def __init__(self, layers: Iterable[str]) -> None:
        self.layers = dict.fromkeys(layers, False)  # whether a call was measured
        self.skipped = dict.fromkeys(self.layers, "it was not called")
        self.found: dict[_Key, _Found] = {}
        self.gradients: dict[_Key, Products] = {}
        self.handles: list[Any] = []
        self.is_open = True

    def see_call(self, fqn: str, layer: _Layer, input: Tensor, output: Tensor) -> None:
        """Measure the operands of a forward, and let a hook measure those of its backward."""
        if (reason := _reason_to_skip(layer, input)) is not None:
            if not self.layers.setdefault(fqn, False):  # a product is known when it is called
                self.skipped[fqn] = reason
            return
        self.layers[fqn] = True
        self.skipped.pop(fqn, None)
        dtype = compute_dtype(input)  # which autocast decides
        uses = _uses(layer.config.plan, input.requires_grad, layer.weight.requires_grad)
        with _without_side_effects(input):
            x, weight, states = layer.local_operands(input)
            factors, is_smooth = None, layer.config.smooth_input
            if is_smooth:
                x, weight, factors = _smoothed(layer, input, x, weight, dtype)
            cast_dtype = None if is_smooth else dtype  # of float16 the products are float32
            operands = {"input": (x, states[0]), "weight": (weight, states[1])}

            def of(use: _Use) -> _Cast:
                return _cast(fqn, layer, use, *operands[use.operand], cast_dtype)

            backward = [use for use in uses if use.gemm != "output"]
            if torch._C._current_graph_task_id() == -1:  # otherwise a backward recomputes it
                self.add([of(use).measured() for use in uses if use.gemm == "output"])
            if not output.requires_grad:
                return
            # Not added before the gradient arrives: a forward may be discarded without a backward.
            later = [of(use).measured() for use in backward if use.operand in operands]
            factor, projected = _factor_of_gradient(layer, dtype), None
            product = layer.config.plan.grad_weight
            if layer.weight.requires_grad and product.a is not None and product.b is not None:
                read = of([use for use in uses if use.operand == "input"][-1])
                features = read.matrix.data.shape[0 if read.is_transposed else 1]
                v = probes(features, factors, read.matrix.data.device)
                projected = contracted(read.matrix, v, read.is_transposed)

        def on_gradient(grad_output: Tensor) -> None:
            if not self.is_open:
                return
            with _without_side_effects(grad_output):
                g = layer.local_grad_output(grad_output)
                g = g if factor is None else as_matrix(g) * factor
                of_g = [use for use in backward if use.operand not in operands]
                seen = [_cast(fqn, layer, use, g, states[2]) for use in of_g]
                self.add([*later, *(each.measured() for each in seen)])
                if projected is not None:
                    self.add_gradient(seen[-1], projected)

        self.handles.append(output.register_hook(on_gradient))

    def add(self, found: list[_Found]) -> None:
        for labels, totals in found:
            before = self.found.get(_key(labels))
            self.found[_key(labels)] = labels, before[1].plus(totals) if before else totals

    def add_gradient(self, g: _Cast, projected: Products) -> None:
        """Add the products of a call; none where other ranks have some of its tokens."""
        if len(projected.exact) == g.matrix.data.shape[1 if g.is_transposed else 0]:
            found = contracted(g.matrix, projected, not g.is_transposed)
            before = self.gradients.get(_key(g.labels))
            self.gradients[_key(g.labels)] = before.plus(found) if before else found

    def close(self, report: Report) -> None:
        """Move the numbers to the host and into the report."""
        self.is_open = False
        for handle in self.handles:  # a loss that is kept would keep the projections of its layers
            handle.remove()
        for key, products in self.gradients.items():
            labels, totals = self.found[key]
            self.found[key] = labels, totals.with_gradient(energies(products))
        self.handles.clear()
        layers = list(self.layers)

        def place(found: _Found) -> tuple[int, int, int]:
            layer, operand, gemm = found[0][:3]
            return layers.index(layer), OPERANDS.index(operand), GEMMS.index(gemm)

        report.fill(statistics_of(sorted(self.found.values(), key=place)), self.skipped)


def _cast(
    fqn: str,
    layer: _Layer,
    use: _Use,
    x: Tensor,
    state: DelayedState | None,
    dtype: torch.dtype | None = None,
) -> _Cast:
    """Cast an operand as the layer does."""
    scaling, suffix = use.cast.scaling_type.value, ""
    if isinstance(x, Float8Tensor):
        scaling, matrix = IN_FLOAT8, _as_matrix_in_float8(x)
    else:
        x = as_matrix(x)
        x = x if dtype is None else x.to(dtype)
        x = x.t() if use.is_transposed else x
        data, scale = bind_and_cast(x, use.cast, state, emulate=layer.config.emulate)
        matrix = _local_part(Float8Matrix(data, scale, use.cast.block, x))
        suffix = SMOOTH if layer.config.smooth_input and use.operand != "grad_output" else ""
    fmt, block = FORMATS[matrix.data.dtype].name, block_name(matrix.block)
    labels = CastLabels(fqn, use.operand, use.gemm, fmt, scaling, block + suffix)
    return _Cast(labels, matrix, use.is_transposed)


def _smoothed(
    layer: _Layer, input: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The products that a layer with ``smooth_input`` casts, and the factors of the local input.

    An input in float8 has its factors in its scales.
    """
    weight = weight.to(dtype)
    if isinstance(x, Float8Tensor):
        return x, smoothed(weight, inverse(split(as_matrix(x.scale))[1])), None
    x_MK = as_matrix(x).to(dtype)
    factors, of_weight = layer.local_factors(input, x_MK)
    products = smoothed(x_MK, factors), smoothed(weight, inverse(of_weight))
    return *products, _of_local_columns(factors, x_MK)


def _reason_to_skip(layer: _Layer, input: Tensor) -> str | None:
    """Why a call cannot be measured, or None."""
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
def _without_side_effects(x: Tensor) -> Iterator[None]:
    """Hide the operations of a block from autograd, autocast and modes."""
    kind = x.device.type
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())  # an outer transform changes functions
        if autocasts(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_disable_current_modes())  # selective checkpointing counts operations
        yield


def _uses(plan: LinearPlan, needs_x: bool, needs_w: bool) -> list[_Use]:
    """The casts of a call, in the order of their GEMMs.

    A second use that reads the bytes of the first is not a second cast.
    """
    output, grad_input, grad_weight = plan.output, plan.grad_input, plan.grad_weight
    both = output.a is not None and output.b is not None
    read_x, read_w = needs_w and not plan.x.is_shared, needs_x and not plan.w.is_shared
    read_g = needs_w and not (needs_x and grad_input.a is not None and plan.g.is_shared)
    found = [
        ("input", "output", output.a if both else None, False),
        ("weight", "output", output.b if both else None, False),
        ("input", "grad_weight", grad_weight.b if read_x else None, True),
        ("weight", "grad_input", grad_input.b if read_w else None, True),
        ("grad_output", "grad_input", grad_input.a if needs_x else None, False),
        ("grad_output", "grad_weight", grad_weight.a if read_g else None, True),
    ]
    return [_Use(operand, gemm, cast, t) for operand, gemm, cast, t in found if cast is not None]


def _factor_of_gradient(layer: _Layer, dtype: torch.dtype) -> Tensor | None:
    """The scales of a resident weight that multiply the gradient before its cast, if any do."""
    if not is_resident(layer.weight):
        return None
    weight = float8_weight(layer, plan_for(layer.config, layer.weight.device, dtype))
    return (
        weight.transposed[1] if weight is not None and weight.reads is by_scaled_gradient else None
    )


def _as_matrix_in_float8(x: Float8Tensor) -> Float8Matrix:
    """A tensor in float8 as a matrix, with its leading dimensions flattened."""
    block = x.block if x.dim() > 1 else (WHOLE, *x.block)
    return Float8Matrix(as_matrix(x.float8_data), as_matrix(x.scale), block[-2:])


def _local_part(matrix: Float8Matrix) -> Float8Matrix:
    """This rank's part of the cast of a DTensor, with the scales of that part."""
    whole, data = cast(Any, matrix.source), cast(Any, matrix.data)
    if not is_sharded(whole):
        return matrix
    local_scale = _like(whole, matrix.scale, (0, 1))
    return Float8Matrix(data.to_local(), local_scale, matrix.block, whole.to_local())


def _of_local_columns(factors_1K: Tensor, x_MK: Tensor) -> Tensor:
    """The factors of the columns of this rank's part of x."""
    return _like(x_MK, factors_1K, (1,)) if is_sharded(factors_1K) else factors_1K


def _like(whole: Tensor, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """This rank's part of scales, cut as a DTensor is along those dimensions that both have."""
    from torch.distributed.tensor import Replicate, Shard

    cut = (p.dim if p.is_shard() else None for p in cast(Any, whole).placements)
    placements = [Shard(d) if d in dims and scale.shape[d] > 1 else Replicate() for d in cut]
    local: Tensor = cast(Any, scale).redistribute(placements=placements).to_local()
    return local
