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
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)
from torch.distributed.tensor.placement_types import Placement

from float8.config import Float8LinearConfig, ScalingType
from float8.distributed.exchange import (
    Ranks,
    as_replicated,
    check_even,
    check_mesh,
    gather_input,
    sends_input_in_float8,
)
from float8.distributed.parallel_linear import (
    COLWISE,
    ROWWISE,
    Float8ParallelLinear,
    Layout,
    ParallelLinear,
)
from float8.linear.layer import Float8Linear

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]


class Float8ColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` for float8: an input that is cut (sequences) is gathered as float8.

    Arguments as ``ColwiseParallel``. Works on an ``nn.Linear`` (converted later, or never) and on a
    `Float8Linear`. The input may also be what `PrepareFloat8ModuleInput` made.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = _layout(COLWISE, self, device_mesh)
        return _parallelized(module, self._partition_linear_fn, layout)


class Float8RowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` for float8: the gradient of a scattered output is gathered as float8.

    Arguments as ``RowwiseParallel``. Works on an ``nn.Linear`` (converted later, or never) and on a
    `Float8Linear`. The bias is added once, after the sum over ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = _layout(ROWWISE, self, device_mesh)
        return _parallelized(module, self._partition_linear_fn, layout)


def _layout(kind: str, style: Any, mesh: DeviceMesh) -> Layout:
    (given,), (wanted,) = style.input_layouts, style.output_layouts
    return Layout(kind, mesh, given, wanted, style.use_local_output)


def _parallelized(module: nn.Module, partition: Any, layout: Layout) -> nn.Module:
    plain_or_float8: dict[type, type] = {
        nn.Linear: ParallelLinear,
        Float8Linear: Float8ParallelLinear,
    }
    cls = plain_or_float8.get(type(module))
    if cls is None:
        raise NotImplementedError(
            f"Float8{layout.kind.capitalize()}Parallel parallelizes nn.Linear and Float8Linear, "
            f"got {type(module).__name__}; give other modules torch's own style"
        )
    if isinstance(module, Float8Linear) and module.config.enable_fsdp_float8_all_gather:
        raise ValueError(
            f"{module.fqn or 'Float8Linear'}: enable_fsdp_float8_all_gather=True stores its weight "
            "for FSDP2 alone; leave the option off for tensor-parallel layers, whose weights "
            "fully_shard then gathers in high precision"
        )
    partition("", module, layout.mesh)
    # The module stays the same object, with its hooks and names. FSDP2 does it this way too.
    module.__class__ = cls
    module.layout = layout  # type: ignore[assignment]
    return module


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` for float8: an input is cast once and gathered as float8.

    Tensors whose layout goes from ``Shard`` to ``Replicate`` are gathered as float8, if the layers
    cast inputs with one dynamic or static scale. All others, and those for layers with other
    recipes or under `float8.high_precision`, are prepared as torch does.

    The prepared tensor is an input of `Float8ColwiseParallel` layers. It is a DTensor that holds a
    `Float8Tensor`: gradients are summed over layers first, and then over ranks in one
    reduce-scatter. With ``use_local_output=True`` it is a `Float8Tensor`, and every layer sums its
    gradient over ranks by itself. A layer of that style that is in high precision reads the
    dequantised values. ``torch.compile`` must see the module and its caller in one graph.

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
            return self._prepared(module, args, kwargs, device_mesh)

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def _prepared(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        config = _config_of_layers(module, self.fwd_config_submodule_fqn)
        if self.input_layouts is not None:
            if len(args) != len(self.input_layouts):
                raise ValueError(
                    f"{type(module).__name__} was called with {len(args)} inputs, and "
                    f"input_layouts names {len(self.input_layouts)}; write None for one that "
                    "stays as it is"
                )
            desired = self.desired_input_layouts or ()
            layouts = zip(args, self.input_layouts, desired, strict=True)
            args = tuple(self._prepared_one(config, mesh, *each) for each in layouts)
        given, wanted = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return args, {
            name: self._prepared_one(config, mesh, value, given.get(name), wanted.get(name))
            for name, value in kwargs.items()
        }

    def _prepared_one(
        self,
        config: Float8LinearConfig | None,
        mesh: DeviceMesh,
        x: Any,
        given: Placement | None,
        wanted: Placement | None,
    ) -> Any:
        if isinstance(x, DTensor):
            given = None if given is None else x.placements[0]
        if (
            config is None
            or not isinstance(given, Shard)
            or not isinstance(wanted, Replicate)
            or not isinstance(x, Tensor)
            or not x.is_floating_point()
        ):
            return self._prepare_input_arg(x, mesh, given, wanted)
        ranks, dim = Ranks.of(mesh), given.dim
        if isinstance(x, DTensor):
            check_mesh(x, mesh, "PrepareFloat8ModuleInput")
            length, part = x.shape[dim], x.to_local()
        else:
            check_even(x, dim, ranks, "PrepareFloat8ModuleInput")
            length, part = x.shape[dim] * ranks.size, x
        whole = gather_input(
            part, dim, length, ranks, config, sums_gradient=not self.use_local_output
        )
        return whole if self.use_local_output else as_replicated(whole, mesh)


def _config_of_layers(module: nn.Module, fqn: str | None) -> Float8LinearConfig | None:
    """The config that casts a module's input; None if the input stays in high precision."""
    below = module if fqn is None else module.get_submodule(fqn)
    layers = [m for m in below.modules() if isinstance(m, Float8Linear)]
    if not layers or any(layer.high_precision for layer in layers):
        return None
    first = layers[0].config
    for layer in layers:
        if layer.config.cast_config_input != first.cast_config_input:
            raise ValueError(
                f"PrepareFloat8ModuleInput: the layers of {type(module).__name__} cast their "
                f"inputs differently ({layers[0].fqn}: {first.cast_config_input.summary}, "
                f"{layer.fqn}: {layer.config.cast_config_input.summary}); name the one that "
                "reads this input in fwd_config_submodule_fqn"
            )
    is_delayed = first.cast_config_input.scaling_type is ScalingType.DELAYED
    return None if is_delayed or not sends_input_in_float8(first.plan) else first
