"""`clip_grad_norm_`: one norm of gradients that lie on several meshes.

Under expert parallelism the experts' gradients are DTensors on one mesh, and the others plain
tensors, or DTensors on another mesh. `torch.nn.utils.clip_grad_norm_` refuses such a mixture
(torch 2.13). Norms of the parts would clip each part by another factor.

The norm of each mesh is computed as torch does, summed over the shards and counting replicas once;
the total is the norm of these norms.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients by one factor, so that their norm is at most ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_`, also where gradients are DTensors on different meshes, or
    plain tensors beside DTensors. Every rank calls it, with the parameters in the same order.
    Plain tensors must be equal on all ranks, as DDP leaves them. A pipeline's stages have norms of
    their own: combine these first.

    Args:
        parameters: their ``grad`` is scaled in place; those without one are left out.
        max_norm: the largest norm.
        norm_type: the p of the p-norm, or ``inf``.
        error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite.
        foreach: see torch.

    Returns:
        The norm before clipping, a 0-dimensional plain tensor, equal on all ranks.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[object, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    norms = []
    for part in by_mesh.values():
        grads = [_not_empty(p.grad) for p in part if p.grad is not None]
        norm = get_total_norm(grads, norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    for part in by_mesh.values():
        clip_grads_with_norm_(part, max_norm, total, foreach)
    return total


def _not_empty(grad: Tensor) -> Tensor:
    """A gradient, or a zero if this rank's shard is empty: torch's norm ``inf`` refuses it.

    The other ranks would wait for this one.
    """
    if not isinstance(grad, DTensor) or grad.to_local().numel():
        return grad
    zero = grad.to_local().new_zeros((1,) * grad.dim())
    return DTensor.from_local(zero, grad.device_mesh, grad.placements)
