"""`inspect`: measure the casts of a model's operands while it runs, without changing a result.

::

    with inspect(model) as report:
        loss(model(x), y).backward()
    print(report)

Hooks on every `Float8Linear` (`float8.numerics.passes.watched`) see its input, its weight as the
layer sees it (gathered by FSDP2, in the dtype that autocast asks for), and the gradient of its
output. So does a watcher of every product that the transform
`float8.unit_scaling.transforms.float8` runs, named after its weight or, where that is computed,
numbered. Products that a forward does not reach are unknown to it.
Each operand is cast once more, exactly as the layer casts it: by `linear.casts.cast_alone`
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

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from float8.arguments import check_module
from float8.config import Float8LinearConfig, OperandCast
from float8.config.gemms import GEMM_NAMES
from float8.convert.after_step import NOT_CALLED
from float8.convert.folding import unwrapped
from float8.experts.modules import Float8Experts
from float8.formats import FORMATS
from float8.granularity import WHOLE, block_name
from float8.kernels import is_sharded, mxfp4
from float8.kernels.matrix import ROW
from float8.linear.autograd import STATELESS, States, as_matrix
from float8.linear.casts import DelayedState, cast_alone
from float8.linear.layer import Float8Linear
from float8.linear.module import HasTransforms, name_in_model
from float8.linear.plan import compute_dtype, without_autocast
from float8.linear.resident import is_resident
from float8.linear.smoothing import inverse, smoothed
from float8.numerics.gradient_error import contracted, projected
from float8.numerics.passes import Hook, in_forward, runs_eagerly, watched
from float8.numerics.snapshot import Report
from float8.numerics.statistics import IN_FLOAT8, CastLabels, CastMatrix, Totals, measure_cast
from float8.tensor import Float8Tensor

# Operand -> its name in a plan, and the GEMMs that contract its rows and its columns.
_READERS = {
    "input": (("output", "a"), ("grad_weight", "b")),
    "weight": (("output", "b"), ("grad_input", "b")),
    "grad_output": (("grad_input", "a"), ("grad_weight", "a")),
}


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
    model = unwrapped(model)
    layers, transforms, skipped = _parts(model)
    if not (layers or transforms or skipped):
        raise ValueError(
            f"inspect: {type(model).__name__} has no float8 layer; convert it first, as "
            "convert_to_float8_training(model), or a model of unit_scale by "
            "float8.unit_scaling.transforms.float8, and inspect what that returns, not a part of it"
        )
    report = Report(model=type(model).__name__, step=step)
    inspection = _Inspection(skipped)
    with ExitStack() as stack:
        stack.callback(inspection.fill, report)
        stack.enter_context(runs_eagerly())
        stack.enter_context(watched(layers, inspection.see_call))
        for fqn, products in transforms.items():
            products.watchers.append(see := Hook(partial(inspection.see_product, stack, fqn)))
            stack.callback(products.watchers.remove, see)
        yield report


def has_float8(model: nn.Module) -> bool:
    """Whether there is something in a model that `inspect` takes."""
    return any(_parts(unwrapped(model)))


def _parts(model: nn.Module) -> tuple[dict[str, Float8Linear], dict[str, Any], dict[str, str]]:
    """Layers and transforms whose casts can be watched, and what was not seen yet, with reasons."""
    layers, transforms, skipped = {}, {}, {}
    for name, module in model.named_modules():
        fqn = name_in_model(name)
        products = module.float8_products if isinstance(module, HasTransforms) else None
        if isinstance(module, Float8Linear):
            layers[fqn], skipped[fqn] = module, NOT_CALLED
        elif isinstance(module, Float8Experts):
            skipped[fqn] = "the casts of experts are not watched"
        elif products is not None:
            transforms[fqn], skipped[fqn] = products, "none of its products ran in float8"
    return layers, transforms, skipped


def without_wrappers(fqn: str) -> str:
    """A module's name without those parts and without ``module``, which DDP adds."""
    return ".".join(part for part in name_in_model(fqn).split(".") if part != "module")


class _Product:
    """A product that a transform runs, with what `_Inspection` reads of a layer."""

    high_precision = False  # a transform that is switched off calls no watcher
    local_operands: Any = Float8Linear.local_operands
    local_factors: Any = Float8Linear.local_factors
    local_grad_output: Any = Float8Linear.local_grad_output

    states = STATELESS

    def __init__(self, config: Float8LinearConfig, weight: Tensor) -> None:
        self.config, self.weight = config, weight


_Layer = Float8Linear | _Product
_Found = dict[CastLabels, Totals]


class _Inspection:
    """The numbers between the opening and the closing of a block."""

    def __init__(self, skipped: dict[str, str]) -> None:
        self.skipped = skipped  # layers that were not measured -> the reason
        self.found: _Found = {}

    def see_product(
        self,
        stack: ExitStack,
        owner: str,
        name: str,
        config: Float8LinearConfig,
        input: Tensor,
        weight: Tensor,
        output: Tensor,
    ) -> None:
        """See a product of a transformed module."""
        self.skipped.pop(owner, None)
        fqn = name_in_model(".".join(part for part in (owner, name) if part))
        on_gradient = self.see_call(fqn, _Product(config, weight), (input,), {}, output)
        if on_gradient is not None:
            stack.callback(output.register_hook(on_gradient).remove)

    def see_call(
        self, fqn: str, layer: Any, args: Any, kwargs: Any, output: Tensor | None
    ) -> Callable[[Tensor], None] | None:
        """Measure the operands of a forward; the result measures those of its backward."""
        if output is None:  # the layer raised
            return None
        input: Tensor = args[0] if args else kwargs["input"]
        self.skipped.pop(fqn, None)
        gemms, weight, grad = layer.config.gemms, layer.weight, output.requires_grad
        if layer.high_precision:
            self.skipped[fqn] = "it ran in high precision: float8.high_precision, or an evaluation"
        elif not any(gemm.a or gemm.b for gemm in gemms.all):
            self.skipped[fqn] = "its config casts nothing"
        if fqn in self.skipped:
            return None
        gradients = {"grad_input": input.requires_grad, "grad_weight": weight.requires_grad}
        needed = {"output", *(gemm for gemm, is_needed in gradients.items() if grad and is_needed)}
        casts = partial(_casts, fqn, layer, needed)
        later: _Found = {}  # a forward may be discarded without a backward
        right = None
        with _without_side_effects(input) as dtype:
            x, w, states, factors = _operands(layer, input, dtype)
            of_input = casts("input", x, states[0])
            for labels, matrix in (*of_input, *casts("weight", w, states[1])):
                if labels.gemm != "output":
                    later[labels] = measure_cast(matrix)
                elif in_forward():
                    self.add({labels: measure_cast(matrix)})
            if not grad:
                return None
            if "grad_weight" in needed and gemms.grad_weight.a and gemms.grad_weight.b:
                right = projected(of_input[-1][1], factors)
        # The scales of a resident weight's rows multiply the gradient before its cast.
        is_scaled = is_resident(weight) and weight.block == ROW
        scale = weight.scale.t() if is_scaled else None

        def on_gradient(grad_output: Tensor) -> None:
            with _without_side_effects(grad_output):
                g = as_matrix(layer.local_grad_output(grad_output))
                of_g = casts("grad_output", g if scale is None else g * scale, states[2])
                found = later | {labels: measure_cast(matrix) for labels, matrix in of_g}
                # Not where other ranks have some of the tokens.
                if right is not None and right.shape[1] == len(of_g[-1][1].data):
                    labels, matrix = of_g[-1]  # what grad_weight reads
                    found[labels] = found[labels]._replace(products=contracted(matrix, right))
                self.add(found)

        return on_gradient

    def add(self, found: _Found) -> None:
        for labels, totals in found.items():
            before = self.found.get(labels)
            self.found[labels] = before.plus(totals) if before else totals

    def fill(self, report: Report) -> None:
        """Move the numbers to the host and into the report, in the order of the GEMMs."""
        ordered = sorted(self.found.items(), key=lambda found: GEMM_NAMES.index(found[0].gemm))
        seen = {labels.layer for labels in self.found}
        skipped = {fqn: why for fqn, why in self.skipped.items() if fqn not in seen}
        report.fill([totals.statistics(labels) for labels, totals in ordered], skipped)


def _operands(
    layer: _Layer, input: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, States, Tensor | None]:
    """The input and the weight that a call casts, the states of its casts, and the factors.

    The factors are those of a smooth input.
    """
    x, weight, states = layer.local_operands(input)
    factors = None
    if not isinstance(weight, Float8Tensor):
        weight = weight.to(dtype)
        weight = mxfp4.project(weight) if layer.config.mxfp4_weights else weight
    x = x if isinstance(x, Float8Tensor) else as_matrix(x).to(dtype)
    if layer.config.smooth_input:  # of float16 the products are float32
        factors, of_weight = layer.local_factors(input, x)
        x = smoothed(whole := x, factors)
        factors = _like(whole, factors, (1,)) if is_sharded(factors) else factors
        weight = smoothed(weight, inverse(of_weight))
    return x, weight, states, factors


def _casts(
    fqn: str, layer: _Layer, needed: set[str], operand: str, x: Tensor, state: DelayedState | None
) -> list[tuple[CastLabels, CastMatrix]]:
    """Cast an operand as a call does: this rank's part of it, in its own orientation.

    ``needed`` are the GEMMs that run. A second one that reads the bytes of the first has no cast.
    """
    found: list[tuple[CastLabels, CastMatrix]] = []
    shared: OperandCast | None = None  # the cast of the first GEMM, as the second would state it
    for is_second, (gemm, side) in enumerate(_READERS[operand]):
        how: OperandCast | None = getattr(getattr(layer.config.gemms, gemm), side)
        if how is None or gemm not in needed or how == shared:
            continue
        shared = how.transposed()
        scaling, suffix = how.scaling_type.value, ""
        if isinstance(x, Float8Tensor):
            block = x.block if x.dim() > 1 else (WHOLE, *x.block)
            scaling = IN_FLOAT8
            matrix = CastMatrix(as_matrix(x.float8_data), as_matrix(x.scale), block[-2:])
        else:
            source = x.t() if is_second else x
            found_cast = cast_alone(source, how, state, emulate=layer.config.emulate)
            matrix = _local_part(CastMatrix(*found_cast, source))
            # An operand that was multiplied by factors.
            suffix = ", smooth" if layer.config.smooth_input and operand != "grad_output" else ""
        fmt, granularity = FORMATS[matrix.data.dtype].name, block_name(matrix.block) + suffix
        labels = CastLabels(fqn, operand, gemm, fmt, scaling, granularity)
        found.append((labels, matrix.t() if is_second and matrix.source is not None else matrix))
    return found


@contextmanager
def _without_side_effects(x: Tensor) -> Iterator[torch.dtype]:
    """Hide the operations of a block from autograd, autocast and modes; the compute dtype."""
    dtype = compute_dtype(x)  # which autocast decides
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),  # an outer transform changes functions
        without_autocast(x),
        _disable_current_modes(),  # selective checkpointing counts operations
    ):
        yield dtype


def _local_part(matrix: CastMatrix) -> CastMatrix:
    """This rank's part of the cast of a DTensor, with the scales of that part."""
    whole, data = cast(Any, matrix.source), cast(Any, matrix.data)
    if not is_sharded(whole):
        return matrix
    local_scale = _like(whole, matrix.scale, (0, 1))
    return CastMatrix(data.to_local(), local_scale, matrix.block, whole.to_local())


def _like(whole: Tensor, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """This rank's part of scales, cut as a DTensor is along those dimensions that both have."""
    from torch.distributed.tensor import Replicate, Shard

    cut = (p.dim if p.is_shard() else None for p in cast(Any, whole).placements)
    placements = [Shard(d) if d in dims and scale.shape[d] > 1 else Replicate() for d in cut]
    return cast(Any, scale).redistribute(placements=placements).to_local()
