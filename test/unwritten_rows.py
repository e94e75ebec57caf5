"""What grouped products on a GPU leave unwritten, emulated on a CPU, where it is zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from float8.experts import grouped_mm


@contextmanager
def unwritten_rows(fill: float) -> Iterator[None]:
    """``fill`` is what outputs and gradients of tokens hold in rows beyond the last offset."""
    product = grouped_mm.grouped_product

    def unwritten(gemm, a, b, offs) -> Tensor:
        out = product(gemm, a, b, offs)
        if out.dim() == 3:  # grad_weight
            return out
        is_beyond = torch.arange(len(out)) >= offs[-1]
        return torch.where(is_beyond[:, None], fill, out)

    with mock.patch.object(grouped_mm, "grouped_product", unwritten):
        yield
