"""`Float8ExpertParallel`: experts on several ranks, to which tokens travel as float8.

The experts' weights are sharded over a mesh dimension: each rank holds some of the experts, whole.
A rank's tokens are sent to the ranks of their experts and back (`token_exchange`)::

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
    parallelize_module(model, mesh, {"layers.0.moe.experts": Float8ExpertParallel()})

Two interfaces of experts' modules are known:

- ``forward(x, num_tokens_per_expert)``: x (R, D) sorted by expert, num_tokens_per_expert (E,); as
  torchtitan's ``GroupedExperts``. The router's weights are applied by the caller.
- ``forward(hidden_states, top_k_index, top_k_weights)``: (T, D), (T, k), (T, k); as the experts of
  HuggingFace's Transformers. Rows are sorted before they are sent, and weighted after they return.

A hook before the module's forward dispatches, and one after it combines. Between them the module
sees the rows of its own experts, from all ranks, and the local part of each weight under its name.

Ranks must agree: the shapes of experts are compared when they are sharded; the config, the sizes
and the order of the modules at each module's first forward; the bytes of a row in every call. If
ranks differ, all of them raise an error.

The weights' gradients are sums over the tokens of all ranks, each token's being that of its own
rank's loss. Where the loss of a batch is the mean of the ranks' losses, divide them by the number
of ranks, as data parallelism does for other parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from float8.config import Float8LinearConfig, check_config
from float8.distributed.rank_comparison import Facts, compare_once, compare_ranks, config_facts
from float8.distributed.token_exchange import exchange, find_route, innermost_module, row_cast
from float8.linear.plan import compute_dtype
from float8.linear.resident import is_resident

__all__ = ["Float8ExpertParallel"]


class Float8ExpertParallel(ParallelStyle):
    """Shard the experts of a module over a mesh dimension, and send tokens to them in float8.

    For ``parallelize_module``, before ``fully_shard`` and before or after conversion. The module's
    own parameters have the experts as their first dimension, and become DTensors sharded along it.
    Float8 weights, which are frozen, are split as each rank has them; others come from the first
    rank.

    The input in forward and the gradient of the output in backward are dispatched in float8.
    Results and the gradient of the input are combined in the compute dtype. If the config
    multiplies an operand in high precision in any product, the operand is dispatched in high
    precision.

    Args:
        config: says how tokens are cast. The default is the config of the converted module. A
            module that is not converted, or is under `float8.high_precision`, sends tokens in high
            precision.

    Raises:
        RuntimeError: on every rank, if ranks have other experts, or a rank none.
    """

    def __init__(self, *, config: Float8LinearConfig | str | None = None) -> None:
        super().__init__()
        self.config = None if config is None else check_config(config, "Float8ExpertParallel")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name, parameters = type(module).__name__, dict(module.named_parameters())
        error = _reason(parameters, device_mesh.size())
        compare_ranks(
            [device_mesh.get_group()],
            {name: {key: str(tuple(p.shape)) for key, p in parameters.items()}},
            "Give each rank the same model",
            error and f"Float8ExpertParallel: {name} {error}",
            "experts",
        )
        hooks = _Hooks(self.config, device_mesh, next(iter(parameters.values())).shape[0])
        for key, p in parameters.items():
            source = None if is_resident(p) else self.src_data_rank
            placed = distribute_tensor(p, device_mesh, [Shard(0)], src_data_rank=source)
            new: Any = nn.Parameter(placed, p.requires_grad)
            if is_resident(p):  # `fully_shard` shards Parameters
                new._local_tensor = nn.Parameter(new._local_tensor, requires_grad=False)
            module.register_parameter(key, new)
        before, after = (torch.compiler.disable(hook) for hook in (hooks.before, hooks.after))
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)
        return module


def _reason(parameters: dict[str, nn.Parameter], ranks: int) -> str | None:
    """The reason why experts cannot be sharded, or None."""
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter and not is_resident(parameter):
            return f"has a {type(parameter).__name__} as {name}; apply the style once, and first"
    sizes = {name: p.shape[0] if p.dim() else 0 for name, p in parameters.items()}
    experts = max(sizes.values(), default=0)
    if experts != min(sizes.values(), default=0):
        return f"needs the experts as the first dimension of all parameters, which have {sizes}"
    if -(-experts // ranks) * (ranks - 1) >= experts:
        return f"has {experts} experts, which leave one of {ranks} ranks without any; use fewer"
    return None


_CALL = "_expert_parallel_call"  # while a forward runs, what its end needs


class _Hooks:
    """What runs before and after the forward of one module; copies of the module share it."""

    def __init__(self, config: Float8LinearConfig | None, mesh: DeviceMesh, experts: int) -> None:
        self.config, self.experts, self.mesh = config, experts, mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        return self

    def before(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Dispatch the tokens, and show the module its own experts only."""
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
        x_RD, counts_E, unsort = self._sorted(*given)
        config = self.config or getattr(module, "float8_config", None)
        config = None if getattr(module, "high_precision", False) else config
        groups, facts = [self.mesh.get_group()], lambda: self._facts(x_RD, config)
        compare_once(module, groups, facts, subject="experts")
        x_cast = g_cast = None
        if config is not None:
            gemms = config.gemms
            x_cast = row_cast(gemms.output.a, gemms.grad_weight.b)
            g_cast = row_cast(gemms.grad_input.a, gemms.grad_weight.a)
        emulate, (rows, features) = config is not None and config.emulate, x_RD.shape
        row_bytes = features * (compute_dtype(x_RD).itemsize if x_cast is None else 1)
        route, counts_e = find_route(counts_E, rows, row_bytes, self.mesh)
        x_SD = exchange(x_RD[: sum(route.sent)], route, x_cast, emulate)

        def back(y_SD: Tensor) -> Tensor:
            y_RD = exchange(y_SD, route, g_cast, emulate, back=True)
            y_RD = F.pad(y_RD, (0, 0, 0, rows - y_RD.shape[0]))
            return y_RD if unsort is None else unsort(y_RD)

        local = {key: p.to_local() for key, p in module.named_parameters()}
        if module.__dict__.get("num_experts") == self.experts:
            local["num_experts"] = counts_e.numel()
        # Attributes of the object are found before its parameters, which stay as they are.
        hidden = {key: module.__dict__[key] for key in local if key in module.__dict__}
        module.__dict__.update({**local, _CALL: (back, local, hidden)})
        if unsort is None:
            return (x_SD, counts_e), {}
        expert = torch.arange(counts_e.numel(), device=x_SD.device)
        expert = expert.repeat_interleave(counts_e, output_size=x_SD.shape[0]).unsqueeze(1)
        return (x_SD, expert, x_SD.new_ones(expert.shape)), {}

    def after(self, module: nn.Module, args: Any, kwargs: Any, y: Any) -> Any:
        """Combine the results; also called, without any, after a forward that raised."""
        back, local, hidden = module.__dict__.pop(_CALL, (None, {}, {}))
        for key in local:
            del module.__dict__[key]
        module.__dict__.update(hidden)
        return None if back is None or y is None else back(y)

    def _sorted(self, *given: Any) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]:
        """Rows (R, D) sorted by expert, their numbers (E,), and what makes the result of rows."""
        shapes = [tuple(getattr(each, "shape", ())) for each in given]
        if len(given) == 2 and len(shapes[0]) == 2 and shapes[1] == (self.experts,):
            return given[0], given[1], None
        if len(given) != 3 or len(shapes[0]) != 2 or shapes[1] != shapes[2]:
            raise ValueError(
                f"{innermost_module()}: Float8ExpertParallel needs (x (R, D), num_tokens_per_expert"
                f" ({self.experts},)) or (hidden_states (T, D), top_k_index (T, k), top_k_weights "
                f"(T, k)), got {shapes}"
            )
        x_TD, index_TK, weights_TK = given
        order_R = index_TK.flatten().argsort(stable=True)

        def unsort(y_RD: Tensor) -> Tensor:
            y_TKD = torch.empty_like(y_RD).index_copy(0, order_R, y_RD).unflatten(0, shapes[1])
            return (y_TKD * weights_TK.unsqueeze(-1)).sum(1).to(x_TD.dtype)

        # An index of E or more stands for no expert in Transformers; such rows come last.
        counts = torch.bincount(index_TK.flatten(), minlength=self.experts)[: self.experts]
        return x_TD[order_R // shapes[1][1]], counts, unsort

    def _facts(self, x: Tensor, config: Float8LinearConfig | None) -> dict[str, Facts]:
        facts = {"tokens are sent": "as they are"} if config is None else config_facts(config)
        facts |= {"module": innermost_module(), "experts": str(self.experts)}
        return {"expert parallelism": facts | {"features": str(x.shape[1])}}
