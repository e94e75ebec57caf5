"""`ParallelLinear` and `Float8ParallelLinear`: a linear layer cut over one mesh dimension.

The styles of `float8.distributed.tensor_parallel` make them. Parameters are DTensors, as torch's
styles leave them; forward works on the local tensors inside, so that kernels see plain ones, and
knows from its `Layout` what to gather and what to sum. In high precision the layer does what
torch's own styles do, by their code.
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

from float8.distributed.agreement import SHARERS
from float8.distributed.exchange import (
    as_local_summand,
    as_replicated,
    gathered,
    summed_linear,
    with_summed_gradient,
)
from float8.distributed.shards import Ranks, check_even, part_of
from float8.kernels.scaled_mm import architecture
from float8.linear.autograd import States, autocasts, compute_dtype, linear_in_float8
from float8.linear.layer import Float8Linear
from float8.linear.refusals import refuses_call, refuses_input, refuses_layer
from float8.linear.registration import ModuleRule, register_module_rule
from float8.linear.scaling import sharded_state
from float8.tensor import Float8Tensor

COLWISE, ROWWISE = "colwise", "rowwise"


@dataclass(frozen=True)
class Layout:
    """How a layer is cut, and what its plain inputs and its outputs are parts of.

    Args:
        kind: ``"colwise"`` cuts out_features, ``"rowwise"`` in_features.
        mesh: of one dimension.
        input: the placement of an input that is a plain tensor.
        output: the placement of the output.
        use_local_output: return the output's local tensor.
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
        return self  # frozen, and a mesh is not copied with a model

    @property
    def wanted_input(self) -> Placement:
        """The placement in which the product reads its input."""
        return Replicate() if self.kind == COLWISE else Shard(-1)


def local(x: Any) -> Tensor:
    """The local tensor of a parameter; its gradient is placed as the parameter is."""
    result: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return result


class ParallelLinear(nn.Linear):
    """A parallelized ``nn.Linear`` in high precision: what torch's own styles do."""

    layout: Layout

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``, of local tensors or DTensors."""
        return _in_high_precision(self, input)

    def extra_repr(self) -> str:
        """As ``nn.Linear``, and how it is cut."""
        return f"{super().extra_repr()}, {_described(self.layout)}"


class Float8ParallelLinear(Float8Linear):
    """A parallelized `Float8Linear`."""

    plain_type = ParallelLinear
    layout: Layout

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``, laid out as the style says.

        Args:
            input: (..., in_features) as a DTensor of any placement; or plain, this rank's part of
                it as ``input_layouts`` says; a `Float8Tensor` is multiplied as it is.

        Raises:
            TypeError, ValueError: as `Float8Linear`; and for an input on another mesh, or plain
                parts of unequal length.
        """
        if self.high_precision:
            return self._plain_forward(input)
        if isinstance(input, DTensor) and input.device_mesh != self.layout.mesh:
            raise ValueError(
                f"{self._name}: the input lies on {input.device_mesh}, the layer on "
                f"{self.layout.mesh}; redistribute it, or pass its local tensor"
            )
        return self._colwise(input) if self.layout.kind == COLWISE else self._rowwise(input)

    def _plain_forward(self, input: Tensor) -> Tensor:
        return _in_high_precision(self, input)

    @property
    def _records(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _colwise(self, input: Tensor) -> Tensor:
        weight, ranks = local(self.weight), self.layout.ranks
        bias = None if self.bias is None else local(self.bias)
        x = self._whole(input)
        self._check(x, weight)
        _, w_state, g_state = states = self._states()
        states = (
            states[0],
            sharded_state(w_state, ranks.group),
            sharded_state(g_state, ranks.group),
        )
        out = linear_in_float8(x, weight, bias, self.config, states, self._records)
        return self._laid_out(out, Shard(-1))

    def _whole(self, input: Tensor) -> Tensor:
        """All of a colwise layer's input, such that its gradient is summed over ranks."""
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
                f"{self._name}: the input is a part in float8, with a scale of its own; let "
                "Float8ColwiseParallel cast it, or PrepareFloat8ModuleInput"
            )
        dim = layout.input.dim  # type: ignore[attr-defined]
        if self.config.enable_pre_and_post_forward:
            check_even(input, dim, layout.ranks, self._name)
        return self._gathered(input, layout.input, input.shape[dim] * layout.ranks.size)

    def _gathered(self, part: Tensor, placement: Any, length: int) -> Tensor:
        state, ranks = self._states()[0], self.layout.ranks
        return gathered(part, placement.dim, length, ranks, self.config, state, self._records)

    def _rowwise(self, input: Tensor) -> Tensor:
        weight, ranks, wanted = local(self.weight), self.layout.ranks, self.layout.output
        x = self._part(input)
        self._check(x, weight)
        x_state, w_state, g_state = self._states()
        states: States = (
            sharded_state(x_state, ranks.group),
            sharded_state(w_state, ranks.group),
            g_state,
        )
        scatter = wanted.dim % x.dim() if isinstance(wanted, Shard) else None
        out = summed_linear(x, weight, self.config, states, self._records, scatter, ranks)
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
                    "PrepareFloat8ModuleInput; give it to Float8ColwiseParallel layers only"
                )
            return input.redistribute(placements=[Shard(input.dim() - 1)]).to_local()
        if layout.input in (Shard(-1), Shard(input.dim() - 1)):
            return input
        whole = DTensor.from_local(input, layout.mesh, [layout.input], run_check=False)
        return whole.redistribute(placements=[Shard(input.dim() - 1)]).to_local()

    def _laid_out(self, out: Tensor, have: Shard) -> Tensor:
        wanted, use_local = self.layout.output, self.layout.use_local_output
        is_so = wanted in (have, Shard(out.dim() - 1))
        if is_so and use_local:
            return out
        sizes = [*out.shape[:-1], self.weight.shape[0]]
        placed = _placed(out, self.layout, Shard(out.dim() - 1), sizes)
        placed = placed if is_so else placed.redistribute(placements=[wanted])
        return placed.to_local() if use_local else placed

    def local_operands(self, input: Tensor) -> tuple[Tensor, Tensor, States]:
        """What this rank casts: parts of the input and of the weight, or all where it has all."""
        x_state, w_state, g_state = self._states()
        group, is_colwise = self.layout.ranks.group, self.layout.kind == COLWISE
        placement = input.placements[0] if isinstance(input, DTensor) else self.layout.input
        x = local(input) if is_colwise else self._part(input)
        cuts_x = placement.is_shard() or not is_colwise
        cuts_g = self.layout.output.is_shard() or is_colwise
        return (
            x,
            local(self.weight),
            (
                sharded_state(x_state, group) if cuts_x else x_state,
                sharded_state(w_state, group),
                sharded_state(g_state, group) if cuts_g else g_state,
            ),
        )

    def local_grad_output(self, grad_output: Tensor) -> Tensor:
        """A colwise layer casts the gradient of its own columns, a rowwise one that of its part."""
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
        error = refuses_input(input, weight, autocasts(input.device.type))
        if error is not None:
            raise type(error)(f"{self._name}: {error}")
        self._check_float8(input)
        if input.device.type == "cuda" and not self.config.emulate:
            self._check_product(input, weight)

    def _check_product(self, input: Tensor, weight: Tensor) -> None:
        tokens = input.numel() // max(weight.shape[1], 1)
        arch, dtype = architecture(input.device.index), compute_dtype(input)
        grad = torch.is_grad_enabled()
        reason = refuses_call(self.config, weight, tokens, dtype, arch, grad)
        if reason is not None:
            raise ValueError(f"{self._name}, on each of {self.layout.ranks.size} ranks: {reason}")

    def extra_repr(self) -> str:
        """As `Float8Linear`, and how it is cut."""
        return f"{super().extra_repr()}, {_described(self.layout)}"


def _described(layout: Layout) -> str:
    return f"{layout.kind} over {layout.ranks.size} ranks, {layout.input} -> {layout.output}"


def _placed(out: Tensor, layout: Layout, placement: Placement, sizes: list[int]) -> DTensor:
    """A DTensor of a given whole, whose parts need not be of one size."""
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


def _sharers(module: nn.Module) -> list[int] | None:
    """The ranks that must have equal delayed scales for this layer."""
    if isinstance(module, Float8ParallelLinear) and module.config.uses_delayed_scaling:
        return dist.get_process_group_ranks(module.layout.mesh.get_group())
    return None


SHARERS.append(_sharers)
register_module_rule(
    ParallelLinear,
    ModuleRule(
        refuses=lambda module, config: refuses_layer(module.weight, config),  # type: ignore[arg-type]
        convert=Float8ParallelLinear.from_float,  # type: ignore[arg-type]
    ),
)
