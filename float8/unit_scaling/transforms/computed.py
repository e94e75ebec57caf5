"""Tensors that a module computes from its parameters and keeps.

The hooks of ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` store the weight that
they compute as a plain attribute, and some models store a result of their forward. Such a tensor
carries its autograd graph: ``copy.deepcopy`` refuses it and says neither module nor attribute.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

_REMOVERS = (
    "torch.nn.utils.remove_weight_norm, remove_spectral_norm, prune.remove or "
    "parametrize.remove_parametrizations"
)


def refuse_computed_attributes(model: nn.Module) -> None:
    """Refuses a model that ``copy.deepcopy`` could not copy because of such a tensor.

    Raises:
        ValueError: names the module and the attribute.
    """
    for name, module in model.named_modules():
        for attribute, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ValueError(
                    f"{name or 'the model'} ({type(module).__name__}) has {attribute}, a tensor "
                    "that was computed from parameters, and a transform could not copy it. If a "
                    f"hook computes it, remove the hook ({_REMOVERS}); if it is left from a "
                    "forward, set it to None, or keep .detach() of it"
                )


def refuse_computed_weights(model: nn.Module) -> None:
    """Refuses a model with a weight that a parametrization or a hook of torch's computes.

    Raises:
        ValueError: names the module.
    """
    for name, module in model.named_modules():
        if is_parametrized(module) or any(map(_is_torchs, module._forward_pre_hooks.values())):
            raise ValueError(
                f"unit_scale: {name or 'the model'} computes its weight from other parameters, and "
                f"unit scaling does not know its scale: remove that first ({_REMOVERS})"
            )


def _is_torchs(hook: object) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")
