"""Weights of unit scale, and the types of parameters that u-muP's optimizers need.

Unit scaling starts from weights of standard deviation 1 and biases of 0 (arXiv 2303.11257, section
4; u-muP, arXiv 2407.17465, table 2). The weights of an existing model keep their directions and
lose their scale:

    w <- w / std(w)      every parameter of two or more dimensions
    b <- 0               the biases of layers that have such a weight

Norms are left alone, as are vectors that are not such biases, frozen parameters, and weights that
are constant (those of zero-initialised layers have no direction) or have no two elements. A weight
that several modules share is scaled once.

Types, for the learning rates of u-muP's table 2: "norm" for weights of norms, "bias" for their
biases and those of layers, "weight" for the rest, but "output" for the weight of the output
layer. That is the last linear layer of the model, if it is an attribute of the model itself by one
of the names `OUTPUT_NAMES` and shares its weight with no other module. Other layers may or may not
be the last; "weight" is the type whose updates are safe in either case.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from float8.unit_scaling.parameter import MupType, has_parameter_data, set_parameter_data

OUTPUT_NAMES = frozenset(
    {
        *("lm_head", "head", "readout", "output", "out", "output_layer", "unembed", "unembedding"),
        *("classifier", "logits", "to_logits", "fc_out", "embed_out"),
    }
)
_NORM_FILES = ("batchnorm", "normalization", "instancenorm")


def unit_init(model: nn.Module) -> frozenset[str]:
    """Bring weights to standard deviation 1, biases to 0, and mark parameters with their types.

    Returns the names of the parameters of type "output". Parameters that carry a type already,
    those of unit-scaled modules, stay as they are. Raises ValueError if a parameter is on the
    meta device, or a weight is computed from others (``torch.nn.utils``: parametrizations and
    hooks); nothing has been changed then.
    """
    for name, module in model.named_modules():
        hooks = [type(hook).__module__ for hook in module._forward_pre_hooks.values()]
        reason = None
        if is_parametrized(module) or any(hook.startswith("torch.nn.utils.") for hook in hooks):
            reason = "computes its weight from other parameters: remove that first"
        elif any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            reason = "is on the meta device and has no values to scale: materialise it first"
        if reason is not None:
            raise ValueError(f"unit_scale: {name or 'the model'} {reason}")
    output = _output_weight(model)
    for prefix, module in model.named_modules():
        kind, place = type(module).__name__.lower(), type(module).__module__
        is_torchs = place.startswith("torch.nn.modules.")
        norm = "norm" in kind or (is_torchs and place.endswith(_NORM_FILES))
        scaled = not norm and any(p.dim() >= 2 for p in module.parameters(recurse=False))
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if has_parameter_data(parameter):
                continue
            bias = name.endswith("bias") and (norm or parameter.dim() <= 1)
            if parameter.requires_grad and not norm:
                _initialise(parameter, zero=bias and scaled)
            role: MupType = "norm" if norm else "output" if parameter is output else "weight"
            set_parameter_data(parameter, "bias" if bias else role)
    return frozenset(n for n, p in model.named_parameters() if p.mup_type == "output")  # type: ignore[attr-defined]


@torch.no_grad()
def _initialise(parameter: Tensor, zero: bool) -> None:
    if zero:
        parameter.zero_()
    elif parameter.dim() >= 2 and parameter.numel() > 1:
        std = parameter.float().std() if parameter.itemsize < 4 else parameter.std()
        if std > 0:
            parameter.copy_(parameter / std)


def _output_weight(model: nn.Module) -> Tensor | None:
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linears or linears[-1][0] not in OUTPUT_NAMES:
        return None
    weight = linears[-1][1].weight
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return weight if users[id(weight)] == 1 else None
