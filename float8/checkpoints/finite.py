"""Weights that no checkpoint should have: NaN and infinity, and tensors without values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.checkpoints.weights import Item
from float8.linear.float8_weight import is_resident
from float8.linear.registration import stored_by

_SHOWN = 8  # names in a message


@torch.no_grad()
def refuses_values(items: Iterable[Item]) -> str | None:
    """The reason why the values of parameters cannot be saved, or None; all are read once.

    Of a sharded parameter this rank's part is looked at. Buffers may hold infinities, as masks do.
    """
    bad: dict[str, list[str]] = {}
    for item in items:
        if (reason := _refuses(item.source)) is not None:
            bad.setdefault(reason, []).append(item.name)
    parts = []
    for reason, names in bad.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{', '.join(names[:_SHOWN])}{more} {reason}")
    return f"nothing was written: {'; '.join(parts)}" if parts else None


def _refuses(source: Tensor) -> str | None:
    if source.is_meta:
        return "on the meta device, which has no values: load the weights first"
    if not isinstance(source, nn.Parameter) or not source.is_floating_point():
        return None
    rule = stored_by(source)
    plain: Any = source if rule is None else rule.to_plain(source)
    local = plain.to_local() if kernels.is_sharded(plain) else plain
    if _is_finite(local.detach()):
        return None
    return "with NaN or inf (float8.find_nan(model) finds where a step makes them)"


def _is_finite(x: Tensor) -> bool:
    if not x.numel():
        return True
    if not is_resident(x):
        return bool(torch.stack(torch.aminmax(x)).isfinite().all())
    data, scale = x.float8_data, x.scale
    return bool(scale.float().isfinite().all()) and not _has_nan(data)


def _has_nan(data: Tensor) -> bool:
    if data.dtype != torch.float8_e4m3fn:
        return bool(data.float().isnan().any())
    # 0x7F and 0xFF: the largest as signed and as unsigned bytes. Comparisons would need memory.
    largest = data.view(torch.int8).max(), data.view(torch.uint8).max()
    return largest[0].item() == 0x7F or largest[1].item() == 0xFF
