"""Gradients that wait for the optimizer in float8: one byte per element instead of four or two.

::

    handle = hold_gradients_in_float8(model.parameters())
    loss.backward()                    # p.grad is a `HeldGradient`: E4M3 data and one scale

FP8-LM (arXiv 2310.18313, section 2.1) holds weight gradients so. When autograd has written
``p.grad`` a hook casts it, and the tensor in high precision is freed before the next parameter's
gradient is computed: the whole model's gradients in high precision never exist at once. On CUDA a
gradient is read twice, by the kernels of one dynamic cast, and the step reads its one byte.

A NaN or inf makes the scale, and so the whole gradient, NaN: clipping and `GradScaler` see it. A
second backward before the step adds in float32, ``data * scale + new``, and casts the sum: each
microbatch after the first rounds once more. ``p.grad`` may be zeroed, clipped, unscaled and read by
``.dequantize()``; the optimizers of `float8.optim` read it as it is. Where ``p.grad_dtype`` is None
a gradient is cast from the dtype in which it was computed, and reports float32.

DDP and FSDP2 own the memory of the gradients that they reduce: DDP's buckets and FSDP2's shards
stay in high precision. (They may be sent in float8: `float8.distributed.gradients`.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import E4M3
from float8.granularity import WHOLE, Block
from float8.kernels.products import SUPPORT, on_device
from float8.tensor import Float8Tensor

__all__ = ["hold_gradients_in_float8"]

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten.detach.default, aten._to_copy.default)


class HeldGradient(Float8Tensor):
    """A gradient in float8: the `Float8Tensor` that autograd may add to."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op as `Float8Tensor` does, but ``add_`` in float32, of copies too."""
        if func is aten.add_.Tensor and isinstance(args[0], HeldGradient):
            held, new = args
            new = new.dequantize(torch.float32) if isinstance(new, Float8Tensor) else new
            return held.write(held.dequantize(torch.float32).add_(new, **kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _COPIES and type(out) is Float8Tensor:
            return HeldGradient(out.float8_data, out.scale, out.block, out.dtype)
        return out

    __deepcopy__ = Tensor.__deepcopy__  # a clone

    @staticmethod
    def of(gradient: Tensor, dtype: torch.dtype | None = None) -> HeldGradient:
        """A gradient of any strided shape, cast to E4M3 with one scale.

        It reports ``dtype``, by default the gradient's.
        """
        block: Block = (WHOLE,) * gradient.dim()
        data, scale = _cast(gradient.detach(), block)
        return HeldGradient(data, scale, block, dtype or gradient.dtype)

    def write(self, gradient: Tensor) -> HeldGradient:
        """Overwrite the values, with a new scale."""
        data, scale = _cast(gradient, self.block)
        self.float8_data.copy_(data)
        self.scale.copy_(scale)
        return self


def _cast(x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    matrix, whole = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1), (WHOLE, WHOLE)
    family = kernels.family_of(x.device)  # one without float8 conversions casts in plain PyTorch
    kernel = kernels.kernel_for(family, whole, emulate=family not in SUPPORT)
    how = kernels.CastSpec(whole, on_device(E4M3, x.device).dtype, kernel=kernel)
    data, scale, _ = kernels.cast(matrix, how).row_major  # type: ignore[misc]
    return data.reshape(x.shape), scale.reshape((1,) * len(block))


def _hold(p: Tensor) -> None:
    if p.grad is not None and not isinstance(p.grad, HeldGradient):
        p.grad = HeldGradient.of(p.grad, p.grad_dtype or torch.float32)


class HeldGradients:
    """The hooks that cast the gradients of ``parameters`` to float8, until `remove`."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._hooks = [p.register_post_accumulate_grad_hook(_hold) for p in parameters]

    def remove(self) -> None:
        """Leave gradients from now on as autograd writes them; earlier ones stay float8."""
        for hook in self._hooks:
            hook.remove()


def hold_gradients_in_float8(parameters: Iterable[Tensor]) -> HeldGradients:
    """Keep the gradients of these parameters in float8 (E4M3) from backward to step.

    The hooks belong to the Parameter objects: a deep copy or a pickle has none. Compiled models
    run them too; compiled autograd is not supported.

    Args:
        parameters: leaves, of a model that no distributed wrapper has taken.

    Returns:
        A handle: ``remove()`` ends it.

    Raises:
        TypeError: something is no leaf that requires a gradient, or is sharded.
    """
    chosen = list(dict.fromkeys(parameters))
    for p in chosen:
        if not p.is_leaf or not p.requires_grad or kernels.is_sharded(p):
            raise TypeError(
                f"hold_gradients_in_float8: a parameter of shape {tuple(p.shape)} must be a leaf "
                "that requires a gradient, and no DTensor, whose gradients a wrapper owns"
            )
    return HeldGradients(chosen)


torch.serialization.add_safe_globals([HeldGradient])
