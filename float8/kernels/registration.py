"""`define_op`: a function on plain tensors becomes an op, one node to torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("float8", "FRAGMENT")


def define_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    key: str = "CompositeExplicitAutograd",
) -> Any:
    """Define ``torch.ops.float8.<name>``; returns its only overload, the fastest to call.

    Args:
        schema: as ``torch.library`` takes it, without the namespace.
        run: the op.
        fake: returns empty tensors of the right shapes, dtypes and strides.
        key: the dispatch key of ``run``: every device, or "CPU".
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"float8::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.float8, name).default
