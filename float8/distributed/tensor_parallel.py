"""Tensor and sequence parallel layers that send activations and gradients as float8.

A pair of linear layers is cut over the ranks of a mesh dimension as ``torch.distributed.tensor``
does it: the first by columns of its output (`Float8ColwiseParallel`), the second by columns of its
input (`Float8RowwiseParallel`). Between them nothing is sent. Under sequence parallelism, where
norms and residuals see a part of each sequence, the first layer gathers its input and the second
scatters its sum (Megatron-LM, arXiv 2205.05198). The gathers send the float8 data that the GEMMs
read::

    colwise  forward   x  (S / ranks, K)  -> cast, gather (S, K)      one byte per element
             backward  dx (S, K) partial  -> reduce-scatter           high precision: a sum
    rowwise  forward   y  (S, N) partial  -> reduce-scatter           high precision: a sum
             backward  dy (S / ranks, N)  -> cast, gather (S, N)      one byte per element

All parts of a tensor must have one scale. So its amax is the maximum over exactly the ranks of that
mesh dimension. This holds for every operand that the layout cuts, the weight included: there is one
scale per tensor, and the float8 data are those of one process, to the bit.

This needs casts whose data both GEMMs of an operand can read: one scale per tensor, dynamic, static
or delayed. With other recipes, tensors are gathered in high precision and cast by the receiving
rank. Scales of rows or blocks are then those of a rank's part, which is never coarser than in one
process. A gather of a delayed operand needs equal scales on all ranks: the group of `sync` must
include the tensor-parallel ranks.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {
        "attention": PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()),  # once for q, k and v
        "attention.q": Float8ColwiseParallel(),
        "attention.out": Float8RowwiseParallel(output_layouts=Shard(1)),
        "ffn.up": Float8ColwiseParallel(input_layouts=Shard(1)),
        "ffn.down": Float8RowwiseParallel(output_layouts=Shard(1)),
    })

Convert before or after. The layers compute on plain local tensors. Parameters are DTensors, as
torch's styles leave them, so that ``fully_shard`` over another mesh dimension, checkpoints and
optimizers work as with those.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from float8.config import Float8LinearConfig, ScalingType
from float8.distributed.parallel_linear import (
    Float8ParallelLinear,
    ParallelLayout,
    ParallelLinear,
    as_replicated,
    dtensor,
    gather_in_float8,
    sends_in_float8,
    warn_of_high_precision,
)
from float8.linear.layer import Float8Linear
from float8.linear.module import own_config
from float8.linear.plan import plan_of

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]


class Float8ColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` for float8: an input that is cut (sequences) is gathered as float8.

    Arguments as ``ColwiseParallel``. Works on an ``nn.Linear`` (converted later, or never) and on a
    `Float8Linear`. One that runs without conversion warns. The input may also be what
    `PrepareFloat8ModuleInput` made.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _parallelized(module, True, self, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` for float8: the gradient of a scattered output is gathered as float8.

    Arguments as ``RowwiseParallel``. Works on an ``nn.Linear`` (converted later, or never) and on a
    `Float8Linear`. One that runs without conversion warns. The bias is added once, after the sum
    over ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _parallelized(module, False, self, device_mesh)


_PARALLEL: dict[type, type] = {nn.Linear: ParallelLinear, Float8Linear: Float8ParallelLinear}


def _parallelized(module: Any, is_colwise: bool, style: Any, mesh: DeviceMesh) -> nn.Module:
    (given,), (output,) = style.input_layouts, style.output_layouts
    reason, name = None, getattr(module, "fqn", "") or type(module).__name__
    if type(module) not in _PARALLEL:
        reason = "only nn.Linear and Float8Linear are parallelized; give it torch's own style"
    elif isinstance(module, Float8Linear) and module.config.enable_fsdp_float8_all_gather:
        reason = "enable_fsdp_float8_all_gather=True is for FSDP2 alone; leave it off here"
    elif output.is_partial():
        reason = f"output_layouts must be Replicate() or Shard(dim), got {output}"
    if reason is not None:
        raise ValueError(f"{type(style).__name__}: {name}: {reason}")
    style._partition_linear_fn("", module, mesh)
    # The module stays the same object, with its hooks and names. FSDP2 does it this way too.
    module.__class__ = _PARALLEL[type(module)]
    module.layout = ParallelLayout(is_colwise, mesh, given, output, style.use_local_output)
    return module


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` for float8: an input is cast once and gathered as float8.

    Tensors whose layout goes from ``Shard`` to ``Replicate`` are gathered as float8 if the layers
    cast inputs with one dynamic or static scale. Other tensors are prepared as torch does, and so
    are all tensors under `float8.high_precision`.

    The prepared tensor is an input of `Float8ColwiseParallel` layers. It is a DTensor that holds a
    `Float8Tensor`: gradients are summed over layers first, and then over ranks in one
    reduce-scatter. With ``use_local_output=True`` it is a `Float8Tensor`, and every layer sums its
    gradient over ranks by itself. A layer of that style that is in high precision reads the
    dequantised values. A module without float8 layers warns. ``torch.compile`` must see the module
    and its caller in one graph.

    Args:
        fwd_config_submodule_fqn: the name, within the module, of the `Float8Linear` whose config
            says how to cast. By default all layers must have the same input cast.
        arguments: as ``PrepareModuleInput``.
    """

    def __init__(self, *, fwd_config_submodule_fqn: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._config = _config_of_layers(module, self.fwd_config_submodule_fqn)
            return self._prepare_input_kwarg_fn(args, kwargs, device_mesh)

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        config = self._config
        if config is not None and isinstance(input, Tensor) and isinstance(input_layout, Shard):
            x: Any = input if isinstance(input, DTensor) else dtensor(input, mesh, input_layout)
            is_gathered = isinstance(x.placements[0], Shard) and desired_layout == Replicate()
            if is_gathered and x.is_floating_point() and x.device_mesh == mesh:
                plan = plan_of(config, x._local_tensor)
                if sends_in_float8(plan):
                    whole: Any = as_replicated(gather_in_float8(x.to(plan.dtype), plan.x), mesh)
                    return whole.to_local() if self.use_local_output else whole
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


def _config_of_layers(module: nn.Module, fqn: str | None) -> Float8LinearConfig | None:
    """The config that casts a module's input; None if the input stays in high precision."""
    below = module if fqn is None else module.get_submodule(fqn)
    layers = [m for m in below.modules() if isinstance(m, Float8Linear)]
    if not any(own_config(m) for m in below.modules()):
        warn_of_high_precision()
    if not layers or any(layer.high_precision for layer in layers):
        return None
    casts = {layer.config.cast_config_input: layer.fqn for layer in layers}
    if len(casts) > 1:
        named = ", ".join(f"{name}: {cast.summary}" for cast, name in casts.items())
        raise ValueError(
            f"PrepareFloat8ModuleInput: the layers of {type(module).__name__} cast differently "
            f"({named}); name the one that reads this input in fwd_config_submodule_fqn"
        )
    is_delayed = layers[0].config.cast_config_input.scaling_type is ScalingType.DELAYED
    return None if is_delayed else layers[0].config
