"""`scales_of_weights`: the dynamic scales of many weights, from amaxes that one pass finds.

A tensorwise dynamic cast reads its operand twice: once for the amax, once to cast. A weight changes
in optimizer steps alone, and one pass over all weights together finds their amaxes before the casts
(`float8.kernels.amaxes`).

The bits are those of a cast that finds its own amax. The amax is that of the stored weight. A layer
rounds its weight to the compute dtype first, which is monotonic: the amax of the rounded weight is
the rounded amax.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8 import kernels
from float8.linear.bound_plan import BoundCast, BoundPlan
from float8.linear.scaling import Scales

_ALIGNED = 4  # float32s between two scales: kernels are compiled for pointers to 16 bytes


def needs_amax(plan: BoundPlan) -> bool:
    """Whether a cast of the weight has a scale that follows from the amax of the whole weight."""
    return any(_is_from_amax(how) for how in (plan.w.first, plan.w.second))


def _is_from_amax(how: BoundCast | None) -> bool:
    return how is not None and how.is_dynamic and how.is_whole


# A backward cannot save tensors that were made in inference mode.
@torch.no_grad()
@torch.inference_mode(False)
def scales_of_weights(weights: Sequence[tuple[Tensor, BoundPlan]]) -> list[Scales]:
    """The scales of the two casts of each weight, where they follow from its amax.

    The plan of each weight states the compute dtype. Returns, per weight, the scales (1, 1) of the
    casts for output and grad_input.
    """
    amaxes: dict[int, Tensor] = {}
    unknown = [w for w, plan in weights if needs_amax(plan)]
    for device in {w.device for w in unknown}:
        there = [w for w in unknown if w.device == device]
        amaxes |= zip(map(id, there), kernels.amaxes([w.detach() for w in there]), strict=True)
    # Scales that are computed alike are computed together.
    alike: dict[tuple[torch.device, torch.dtype, float, str], list[tuple[int, int]]] = {}
    for index, (weight, plan) in enumerate(weights):
        for number, how in enumerate((plan.w.first, plan.w.second)):
            if how is not None and _is_from_amax(how):
                key = (weight.device, plan.dtype, how.largest, how.scale_format)
                alike.setdefault(key, []).append((index, number))
    scales: list[list[Tensor | None]] = [[None, None] for _ in weights]
    for (_, dtype, largest, scale_format), places in alike.items():
        of_all = torch.stack([amaxes[id(weights[index][0])].reshape(()) for index, _ in places])
        rounded = of_all.to(dtype).float().view(-1, 1, 1)
        computed = kernels.scale_from_amax(rounded, largest, scale_format)
        apart = computed.repeat(1, 1, _ALIGNED).narrow(2, 0, 1)
        for (index, number), scale in zip(places, apart.unbind(), strict=True):
            scales[index][number] = scale.data  # with a version counter of its own
    return [(first, second) for first, second in scales]
