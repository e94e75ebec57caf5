"""`ParallelLinear` and `Float8ParallelLinear`: a linear layer sharded over one mesh dimension.

The styles of `float8.distributed.tensor_parallel` make them. Parameters are DTensors, as with
torch's styles. The GEMMs read local tensors. DTensor moves inputs, outputs and gradients between
ranks, with one exception: where all GEMMs of an operand read the same data, of one scale, it is
cast before its gather. Two autograd functions do so, each the mirror of the other::

    _CastAndGather     forward: cast, gather bytes        backward: sum and scatter
    _SummedLinear      forward: sum and scatter           backward: cast, gather bytes

In high precision the layer runs the code of torch's own styles.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.placement_types import Placement

from float8 import kernels
from float8.config import OperandCast
from float8.distributed.rank_comparison import compare_layer
from float8.granularity import WHOLE
from float8.linear.autograd import Call, States, as_matrix, refuse_double_backward
from float8.linear.casts import DelayedState, cast_matrix, placed, record, sharded_state
from float8.linear.layer import Float8Linear
from float8.linear.module import ModuleRule, register_module_rule
from float8.linear.plan import LinearPlan, Operand, plan_of, without_autocast
from float8.linear.refusals import reason_against_layer
from float8.tensor import Float8Tensor
from float8.tensor.tensor import Differentiable


@dataclass(frozen=True)
class ParallelLayout:
    """How a layer is sharded, and the placements of its plain inputs and its outputs.

    Over the ``mesh`` of one dimension, ``is_colwise`` shards out_features, else in_features are
    sharded. ``input`` is the placement of one that is a plain tensor. ``use_local_output``
    returns the output's local tensor.
    """

    is_colwise: bool
    mesh: DeviceMesh
    input: Placement
    output: Placement
    use_local_output: bool

    def __str__(self) -> str:
        kind = "colwise" if self.is_colwise else "rowwise"
        return f"{kind} over {self.mesh.size()} ranks, {self.input} -> {self.output}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelLayout:
        return self  # immutable; copies of a model share the mesh

    @property
    def group(self) -> str:
        """The name of the process group."""
        return str(self.mesh.get_group().group_name)

    def read(self, input: Tensor) -> Placement:
        """The placement in which the GEMM reads an input."""
        return Replicate() if self.is_colwise else Shard(input.dim() - 1)


# --- parts of tensors


def dtensor(
    x: Tensor, mesh: DeviceMesh, placement: Placement, length: int | None = None
) -> DTensor:
    """The DTensor of which x is this rank's part.

    ``length`` is that of the sharded dimension over all ranks, whose parts may differ in size.
    """
    if length is None:
        return DTensor.from_local(x, mesh, [placement], run_check=False)
    shape = list(x.shape)
    shape[placement.dim] = length  # type: ignore[attr-defined]
    return placed(x, shape, mesh, [placement])


def moved(x: DTensor, to: Placement) -> Tensor:
    """The local tensor of x in another placement."""
    return x.redistribute(placements=[to]).to_local()


def gathers_in_float8(operand: Operand) -> bool:
    """Whether both GEMMs of an operand can read the same float8 data, cast on any rank."""
    return operand.first is not None and operand.shares_data and operand.first.is_whole


def _cast_and_gather(
    x: Tensor,
    how: OperandCast,
    state: DelayedState | None,
    records: bool,
    mesh: DeviceMesh,
    shard: Any,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Data and scale of a whole tensor, of which x is this rank's part, in high precision."""
    state = sharded_state(state, mesh.get_group().group_name)
    found = cast_matrix(as_matrix(x), how, state, finds_amax=records)
    record(state, found.amax)
    data, scale, _ = found.row_major  # type: ignore[misc]
    bytes_ = data.reshape(x.shape).view(torch.uint8)  # gloo has no float8
    whole = moved(dtensor(bytes_, mesh, shard, length), Replicate())
    return whole.view(data.dtype), scale.clone()  # a delayed scale is a buffer, which sync changes


class _CastAndGather(torch.autograd.Function):
    """(carrier of the gradient, data, scale) of a whole tensor; each rank computes a summand of
    its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
        data, scale = _cast_and_gather(x, *how)
        ctx.mesh, ctx.shard = how[3:5]
        ctx.mark_non_differentiable(data, scale)
        return x.new_empty(()).expand(data.shape), data, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return moved(dtensor(g, ctx.mesh, Partial()), ctx.shard), *(None,) * 6


class _SummedLinear(torch.autograd.Function):
    """This rank's part of the sum of ``x @ weight.T`` over ranks, with its GEMMs.

    torch.compile traces a backward with gradients of the type of the forward's output. So it is one
    function: the gathered gradient is a `Float8Tensor`, and no gradient of another function.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_NK: Tensor, call: Call, mesh: DeviceMesh, shard: Any, function: Any
    ) -> Tensor:
        product = function.forward(ctx, x, w_NK, None, call)
        ctx.function, ctx.parts = function, (mesh, shard, product.shape[shard.dim])
        return moved(dtensor(product, mesh, Partial()), shard)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("Float8RowwiseParallel")
        with without_autocast(g):
            call = ctx.call
            how = (call.plan.g.first, call.states[2], call.records_amax, *ctx.parts)
            data, scale = _cast_and_gather(g, *how)
            whole = Float8Tensor(as_matrix(data), scale, (WHOLE, WHOLE), g.dtype)
            grad_x, grad_w, _ = ctx.function.gradients(ctx, whole)
        return grad_x, grad_w, None, None, None, None


def gather_in_float8(
    x: DTensor, operand: Operand, state: DelayedState | None = None, record: bool = False
) -> Tensor:
    """The whole input that x is sharded of, as a `Float8Tensor`; its gradient is a summand.

    ``operand`` is one that `gathers_in_float8`. A delayed cast has a ``state``, and records amaxes
    if ``record`` is True.
    """
    shard: Any = x.placements[0]
    how = (operand.first, state, record, x.device_mesh, shard, x.shape[shard.dim])
    carrier, data, scale = _CastAndGather.apply(x.to_local(), *how)
    return Differentiable.apply(carrier, data, None, scale)


class _AsReplicated(torch.autograd.Function):
    """Make a DTensor of a tensor that every rank has; the gradient stays one summand per rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.is_first = mesh.get_local_rank() == 0
        return dtensor(x, mesh, Replicate())

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Tensor, None]:
        if g.placements[0].is_partial():
            return g.to_local(), None
        whole = moved(g, Replicate())  # the sum: count it once
        return whole if ctx.is_first else torch.zeros_like(whole), None


def as_replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor of x, which every rank has; each rank's gradient of x is its own summand."""
    return _AsReplicated.apply(x, mesh)


# --- the layers


def warn_of_high_precision() -> None:
    """Warn that a module with a float8 style has no layer in float8."""
    warnings.warn(
        "Float8ColwiseParallel, Float8RowwiseParallel or PrepareFloat8ModuleInput runs in high "
        "precision, because layers are not converted: call convert_to_float8_training(model), "
        "and give layers that it leaves out torch's own styles",
        stacklevel=3,
    )


warn_of_high_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


class ParallelLinear(nn.Linear):
    """A parallelized ``nn.Linear`` in high precision, equal to torch's own styles."""

    layout: ParallelLayout

    def forward(self, input: Tensor) -> Tensor:
        """Compute what ``nn.Linear`` does, of local tensors or DTensors."""
        warn_of_high_precision()
        return _in_high_precision(self, input)

    def extra_repr(self) -> str:
        """What ``nn.Linear`` shows, and the layout."""
        return f"{super().extra_repr()}, {self.layout}"


class Float8ParallelLinear(Float8Linear):
    """A parallelized `Float8Linear`."""

    plain_type = ParallelLinear
    layout: ParallelLayout

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``, with the placement that the style says.

        ``input`` (..., in_features) is a DTensor of any placement; or a plain tensor, this rank's
        part as ``input_layouts`` says. A `Float8Tensor` is not cast again. Raises the errors of
        `Float8Linear`, and also refuses an input on another mesh.
        """
        if self.high_precision:
            return _in_high_precision(self, input)
        if not torch.compiler.is_compiling():
            compare_layer(self, self.layout.mesh.get_group())
        layout, is_colwise = self.layout, self.layout.is_colwise
        x, weight, wanted = self._read(input), shard_of(self.weight), layout.output
        call = self.begin_call(x, weight)
        call.states = self._states_of_parts(input=not is_colwise, grad_output=is_colwise)
        if isinstance(wanted, Shard):
            wanted = Shard(wanted.dim % x.dim())
        multiply = self.function.apply
        mesh, last = layout.mesh, x.dim() - 1
        if is_colwise:
            bias = None if self.bias is None else shard_of(self.bias)
            out = multiply(x, weight, bias, call)
            y: Any = dtensor(out, mesh, Shard(last), self.weight.shape[0])
        elif isinstance(wanted, Shard) and gathers_in_float8(call.plan.g):
            with without_autocast(x):
                out = _SummedLinear.apply(x, weight, call, mesh, wanted, self.function)
            length = self.weight.shape[0] if wanted.dim == last else x.shape[wanted.dim]
            y = dtensor(out, mesh, wanted, length)
        else:
            y = dtensor(multiply(x, weight, None, call), mesh, Partial())
        y = y.redistribute(placements=[wanted])
        if not is_colwise and self.bias is not None:
            # The gradient of the redistribution is the sum over ranks that have other tokens.
            bias = self.bias.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
            y = y + bias.to(y.dtype)
        return y.to_local() if layout.use_local_output else y

    def _states_of_parts(self, *, input: bool, grad_output: bool) -> States:
        """The states of the three casts, with the group over which amaxes are reduced.

        ``input`` and ``grad_output`` say whether this rank casts only a part of each. Of the weight
        it always does.
        """
        x, w, g = self.states
        group = self.layout.group
        return (
            sharded_state(x, group if input else None),
            sharded_state(w, group),
            sharded_state(g, group if grad_output else None),
        )

    def _read(self, input: Tensor) -> Tensor:
        """The input as the GEMM reads it: whole if colwise, this rank's columns if rowwise."""
        layout, wanted = self.layout, self.layout.read(input)
        x: Any = input if isinstance(input, DTensor) else dtensor(input, layout.mesh, layout.input)
        if x.device_mesh != layout.mesh:
            raise ValueError(
                f"{self._name}: the input lies on {x.device_mesh}, and the layer on {layout.mesh}"
            )
        if not isinstance(x._local_tensor, Float8Tensor):
            plan = plan_of(self.config, x._local_tensor)
            x = x if x.dtype == plan.dtype else x.to(plan.dtype)
            if layout.is_colwise and x.placements[0].is_shard() and sends_in_float8(plan):
                record = self.training and torch.is_grad_enabled()
                return gather_in_float8(x, plan.x, self.states[0], record)
        grads = [Partial() if layout.is_colwise else wanted]
        return x.redistribute(placements=[wanted]).to_local(grad_placements=grads)

    # --- for `float8.numerics`

    def local_operands(self, input: Tensor) -> tuple[Tensor, Tensor, States]:
        """The input and the weight that this rank casts, and the states of the three casts."""
        layout = self.layout
        given = input.placements[0] if isinstance(input, DTensor) else layout.input
        states = self._states_of_parts(
            input=given.is_shard() or not layout.is_colwise,
            grad_output=layout.output.is_shard() or layout.is_colwise,
        )
        return (
            shard_of(input) if layout.is_colwise else self._read(input),
            shard_of(self.weight),
            states,
        )

    def local_factors(self, input: Tensor, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        """Find the factors; a colwise layer gathers its input before."""
        whole_MK = as_matrix(self._read(input)).to(x_MK.dtype)
        factors_1K = kernels.smoothing_factors_from_amax(kernels.column_amaxes(whole_MK))
        if whole_MK.shape[1] == x_MK.shape[1]:  # this part has all columns that the GEMM reads
            return factors_1K, factors_1K
        return moved(dtensor(factors_1K, self.layout.mesh, Replicate()), Shard(1)), factors_1K

    def local_grad_output(self, grad_output: Tensor) -> Tensor:
        """The part of the output's gradient that this rank casts."""
        layout, last = self.layout, grad_output.dim() - 1
        read = Shard(last) if layout.is_colwise else layout.output
        if not isinstance(grad_output, DTensor):
            if layout.output in (read, Shard(-1)):
                return grad_output
            grad_output = dtensor(grad_output, layout.mesh, layout.output)
        return moved(grad_output, read)

    def extra_repr(self) -> str:
        """What `Float8Linear` shows, and the layout."""
        return f"{super().extra_repr()}, {self.layout}"


def shard_of(x: Any) -> Tensor:
    """The local tensor of a parameter; its gradient is placed as the parameter is."""
    return x.to_local() if isinstance(x, DTensor) else x


def sends_in_float8(plan: LinearPlan) -> bool:
    """Whether an input is cast before its gather.

    The factors of a smooth input need the amaxes of whole channels, before the cast.
    """
    return gathers_in_float8(plan.x) and not plan.smooth_input


def _in_high_precision(layer: nn.Linear, input: Tensor) -> Tensor:
    layout: ParallelLayout = layer.layout  # type: ignore[assignment]
    mesh = layout.mesh
    if isinstance(input, Float8Tensor):
        input = input.dequantize()
    if isinstance(input, DTensor) and isinstance(input._local_tensor, Float8Tensor):
        input = as_replicated(input.to_local(grad_placements=[Partial()]).dequantize(), mesh)
    given, wanted = (layout.input,), (layout.read(input),)
    x = ColwiseParallel._prepare_input_fn(given, wanted, layer, (input,), mesh)
    out, use_local = F.linear(x, layer.weight, layer.bias), layout.use_local_output
    return ColwiseParallel._prepare_output_fn((layout.output,), use_local, layer, out, mesh)


register_module_rule(
    ParallelLinear,
    ModuleRule(
        refuses=lambda module, config: reason_against_layer(module.weight, config),  # type: ignore[arg-type]
        convert=Float8ParallelLinear.from_float,  # type: ignore[arg-type]
    ),
)
