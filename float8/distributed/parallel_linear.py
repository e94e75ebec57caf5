"""`ParallelLinear` and `Float8ParallelLinear`: a linear layer sharded over one mesh dimension.

The styles of `float8.distributed.tensor_parallel` make them. Parameters are DTensors, as with
torch's styles. Forward works on their local tensors, so that kernels see plain tensors. The layer's
`Layout` says which tensors are gathered and summed. In high precision the layer runs the code of
torch's own styles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.placement_types import Placement

from float8 import kernels
from float8.distributed.exchange import (
    Ranks,
    as_local_summand,
    as_replicated,
    check_even,
    check_mesh,
    gather,
    gather_input,
    part_of,
    summed_linear,
    with_summed_gradient,
)
from float8.distributed.rank_comparison import RANKS_OF_ONE_SCALE, compare_layer
from float8.linear.autograd import States, call_of, linear_in_float8
from float8.linear.bound_plan import plan_for
from float8.linear.layer import Float8Linear
from float8.linear.refusals import refuses_layer
from float8.linear.registration import ModuleRule, register_module_rule
from float8.linear.scaling import max_over_ranks, sharded_state
from float8.tensor import Float8Tensor

COLWISE, ROWWISE = "colwise", "rowwise"


@dataclass(frozen=True)
class Layout:
    """How a layer is sharded, and the placements of its plain inputs and its outputs.

    ``kind`` ``"colwise"`` shards out_features, ``"rowwise"`` in_features. The mesh has one
    dimension. ``input`` is the placement of an input that is a plain tensor. ``use_local_output``
    returns the output's local tensor.
    """

    kind: str
    mesh: DeviceMesh
    input: Placement
    output: Placement
    use_local_output: bool

    def __post_init__(self) -> None:
        if self.mesh.ndim != 1:
            raise ValueError(
                f"a tensor-parallel mesh has one dimension, got {self.mesh}; slice it by name, as "
                'mesh["tp"]'
            )
        for name, placement in (("input_layouts", self.input), ("output_layouts", self.output)):
            if not (placement.is_replicate() or placement.is_shard()):
                raise ValueError(f"{name} must be Replicate() or Shard(dim), got {placement}")
        object.__setattr__(self, "ranks", Ranks.of(self.mesh))

    ranks: Ranks = None  # type: ignore[assignment]  # follows from the mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self  # immutable; copies of a model share the mesh

    @property
    def wanted_input(self) -> Placement:
        """The placement in which the GEMM reads its input."""
        return Replicate() if self.kind == COLWISE else Shard(-1)


def local(x: Any) -> Tensor:
    """The local tensor of a parameter; its gradient is placed as the parameter is."""
    result: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return result


class ParallelLinear(nn.Linear):
    """A parallelized ``nn.Linear`` in high precision, equal to torch's own styles."""

    layout: Layout

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``, of local tensors or DTensors."""
        return _in_high_precision(self, input)

    def extra_repr(self) -> str:
        """As ``nn.Linear``, and the layout."""
        return f"{super().extra_repr()}, {_described(self.layout)}"


class Float8ParallelLinear(Float8Linear):
    """A parallelized `Float8Linear`."""

    plain_type = ParallelLinear
    layout: Layout

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``, with the placement that the style says.

        ``input`` (..., in_features) is a DTensor of any placement; or a plain tensor, this rank's
        part as ``input_layouts`` says. A `Float8Tensor` is not cast again. Raises the errors of
        `Float8Linear`, and also refuses an input on another mesh and plain parts of unequal length.
        """
        if self.high_precision:
            return self._plain_forward(input)
        if isinstance(input, DTensor):
            check_mesh(input, self.layout.mesh, self._name)
        if not torch.compiler.is_compiling():
            compare_layer(self, self.layout.mesh.get_group())
        return self._colwise(input) if self.layout.kind == COLWISE else self._rowwise(input)

    def _plain_forward(self, input: Tensor) -> Tensor:
        return _in_high_precision(self, input)

    def _states_of_parts(self, *, input: bool, grad_output: bool) -> States:
        """The states of the three casts, with the group over which amaxes are reduced.

        ``input`` and ``grad_output`` say whether this rank casts only a part of each. Of the weight
        it always does.
        """
        x_state, w_state, g_state = self._states()
        group = self.layout.ranks.group
        return (
            sharded_state(x_state, group) if input else x_state,
            sharded_state(w_state, group),
            sharded_state(g_state, group) if grad_output else g_state,
        )

    @property
    def _records(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _colwise(self, input: Tensor) -> Tensor:
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        x = self._whole(input)
        self._check(x, weight)
        states = self._states_of_parts(input=False, grad_output=True)
        out = linear_in_float8(x, weight, bias, call_of(self.config, x, states, self._records))
        return self._laid_out(out)

    def _whole(self, input: Tensor) -> Tensor:
        """The whole input of a colwise layer; its gradient is summed over ranks."""
        layout = self.layout
        if isinstance(input, DTensor):
            if input.placements[0].is_partial():
                input = input.redistribute(placements=[Replicate()])
            placement: Placement = input.placements[0]
            if placement.is_replicate():
                return as_local_summand(input)
            length = input.shape[placement.dim]  # type: ignore[attr-defined]
            return self._gathered(input.to_local(), placement, length)
        if layout.input.is_replicate():
            return with_summed_gradient(input, layout.ranks)
        if isinstance(input, Float8Tensor):
            raise ValueError(
                f"{self._name}: the input is this rank's part in float8, with a scale of its own; "
                "pass it in high precision, or use PrepareFloat8ModuleInput"
            )
        dim = layout.input.dim  # type: ignore[attr-defined]
        if self.config.enable_pre_and_post_forward:
            check_even(input, dim, layout.ranks, self._name)
        return self._gathered(input, layout.input, input.shape[dim] * layout.ranks.size)

    def _gathered(self, part: Tensor, placement: Any, length: int) -> Tensor:
        state, ranks = self._states()[0], self.layout.ranks
        return gather_input(part, placement.dim, length, ranks, self.config, state, self._records)

    def _rowwise(self, input: Tensor) -> Tensor:
        weight, ranks, wanted = local(self.weight), self.layout.ranks, self.layout.output
        x = self._part(input)
        self._check(x, weight)
        states = self._states_of_parts(input=True, grad_output=False)
        scatter = wanted.dim % x.dim() if isinstance(wanted, Shard) else None
        call = call_of(self.config, x, states, self._records)
        out = summed_linear(x, weight, call, scatter, ranks)
        if self.bias is not None:
            bias = local(self.bias)
            bias = bias if scatter is None else with_summed_gradient(bias, ranks)
            bias = part_of(bias, 0, ranks) if scatter == out.dim() - 1 else bias
            out = out + bias.to(out.dtype)
        if self.layout.use_local_output:
            return out
        sizes = [*x.shape[:-1], self.weight.shape[0]]
        return _placed(out, self.layout, wanted, sizes)

    def _part(self, input: Tensor) -> Tensor:
        """This rank's columns of a rowwise layer's input."""
        layout = self.layout
        if isinstance(input, DTensor):
            if isinstance(input._local_tensor, Float8Tensor):
                raise ValueError(
                    f"{self._name}: a Float8RowwiseParallel layer takes no input from "
                    "PrepareFloat8ModuleInput; use that with Float8ColwiseParallel layers only"
                )
            return input.redistribute(placements=[Shard(input.dim() - 1)]).to_local()
        if layout.input in (Shard(-1), Shard(input.dim() - 1)):
            return input
        whole = DTensor.from_local(input, layout.mesh, [layout.input], run_check=False)
        return whole.redistribute(placements=[Shard(input.dim() - 1)]).to_local()

    def _laid_out(self, out: Tensor) -> Tensor:
        """A colwise layer's output with the placement that the style says."""
        wanted, use_local, columns = self.layout.output, self.layout.use_local_output, out.dim() - 1
        is_wanted = wanted in (Shard(-1), Shard(columns))
        if is_wanted and use_local:
            return out
        sizes = [*out.shape[:-1], self.weight.shape[0]]
        placed = _placed(out, self.layout, Shard(columns), sizes)
        placed = placed if is_wanted else placed.redistribute(placements=[wanted])
        return placed.to_local() if use_local else placed

    def local_operands(self, input: Tensor) -> tuple[Tensor, Tensor, States]:
        """The input and the weight that this rank casts, and the states of the three casts."""
        is_colwise, placement = self.layout.kind == COLWISE, self._placement(input)
        states = self._states_of_parts(
            input=placement.is_shard() or not is_colwise,
            grad_output=self.layout.output.is_shard() or is_colwise,
        )
        x, weight = local(input) if is_colwise else self._part(input), local(self.weight)
        return x, weight, states

    def local_factors(self, input: Tensor, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Float8Linear`. A colwise layer gathers its input before it finds the factors."""
        placement: Any = self._placement(input)
        if self.layout.kind != COLWISE or not placement.is_shard():
            return super().local_factors(input, x_MK)
        ranks, amaxes = self.layout.ranks, kernels.column_amaxes(x_MK)
        if placement.dim % input.dim() != input.dim() - 1:  # the ranks have other tokens
            factors_1K = kernels.smoothing_factors(max_over_ranks(amaxes, ranks.group))
            return factors_1K, factors_1K
        factors_1K = kernels.smoothing_factors(gather(amaxes, 1, self.weight.shape[1], ranks))
        return part_of(factors_1K, 1, ranks), factors_1K

    def _placement(self, input: Tensor) -> Placement:
        return input.placements[0] if isinstance(input, DTensor) else self.layout.input

    def local_grad_output(self, grad_output: Tensor) -> Tensor:
        """The part of the output's gradient that this rank casts."""
        layout, last = self.layout, grad_output.dim() - 1
        read = Shard(last) if layout.kind == COLWISE else layout.output
        if not isinstance(grad_output, DTensor):
            if read in (layout.output, Shard(last)) and layout.output in (read, Shard(-1)):
                return grad_output
            given = [layout.output]
            grad_output = DTensor.from_local(grad_output, layout.mesh, given, run_check=False)
        return grad_output.redistribute(placements=[read]).to_local()

    def _check(self, input: Tensor, weight: Tensor) -> None:
        if not self.config.enable_pre_and_post_forward:
            return
        self._check_input(input, weight)
        self._check_call(input, weight, plan_for(self.config, input))

    @property
    def _place(self) -> str:
        return f"{self._name}, on each of {self.layout.ranks.size} ranks"

    def extra_repr(self) -> str:
        """As `Float8Linear`, and the layout."""
        return f"{super().extra_repr()}, {_described(self.layout)}"


def _described(layout: Layout) -> str:
    return f"{layout.kind} over {layout.ranks.size} ranks, {layout.input} -> {layout.output}"


def _placed(out: Tensor, layout: Layout, placement: Placement, sizes: list[int]) -> DTensor:
    """A DTensor of shape ``sizes``, whose local parts may differ in size."""
    strides = [1] * len(sizes)
    for dim in reversed(range(len(sizes) - 1)):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return DTensor.from_local(
        out,
        layout.mesh,
        [placement],
        run_check=False,
        shape=torch.Size(sizes),
        stride=tuple(strides),
    )


def _in_high_precision(layer: nn.Linear, input: Tensor) -> Tensor:
    layout: Layout = layer.layout  # type: ignore[assignment]
    if isinstance(input, Float8Tensor):
        input = input.dequantize()
    if isinstance(input, DTensor) and isinstance(input._local_tensor, Float8Tensor):
        input = as_replicated(as_local_summand(input).dequantize(), layout.mesh)
    given, wanted, output = (layout.input,), (layout.wanted_input,), (layout.output,)
    x = ColwiseParallel._prepare_input_fn(given, wanted, layer, (input,), layout.mesh)
    out = F.linear(x, layer.weight, layer.bias)
    use_local = layout.use_local_output
    return ColwiseParallel._prepare_output_fn(output, use_local, layer, out, layout.mesh)


def _ranks_of_one_scale(module: nn.Module) -> list[int] | None:
    """The ranks that must have equal delayed scales for this layer."""
    if isinstance(module, Float8ParallelLinear) and module.config.uses_delayed_scaling:
        return dist.get_process_group_ranks(module.layout.mesh.get_group())
    return None


RANKS_OF_ONE_SCALE.append(_ranks_of_one_scale)
register_module_rule(
    ParallelLinear,
    ModuleRule(
        refuses=lambda module, config: refuses_layer(module.weight, config),  # type: ignore[arg-type]
        convert=Float8ParallelLinear.from_float,  # type: ignore[arg-type]
    ),
)
