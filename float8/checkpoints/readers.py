"""Which libraries read a checkpoint: by its layout, and the names and shapes of its layers.

What is said of Transformers was tried with version 5.23 on a CPU. Where it dequantises blocks, it
takes the shape of a weight divided by that of its scales for the block. What is said of engines is
taken from their sources: none of them has loaded a file of this library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from float8.checkpoints.layout import Layout
from float8.checkpoints.shards import kinds_of
from float8.granularity import Blockwise

Shapes = Mapping[str, tuple[int, ...]]  # layer in float8, as files name it -> (N, K)
TRANSFORMERS = "Transformers 5.23"
_EXPERT = re.compile(r"\bexperts\.\d+\.")  # in memory one of a stack


def transformers_refuses(layout: Layout, shapes: Shapes) -> str | None:
    """The reason why Transformers does not read a checkpoint, or None."""
    if layout.name == "modelopt":
        return "it takes the float8 data for values, without their scales"
    by = layout.granularity
    if not isinstance(by, Blockwise):
        return None
    if layout.name == "fine_grained":
        odd = [
            name
            for name, shape in shapes.items()
            if any(n > size and n % size for n, size in zip(shape, (by.rows, by.cols), strict=True))
        ]
        why = (
            f"where it dequantises, as without a GPU, sizes that are no multiples of {by.rows}x"
            f"{by.cols} give wrong values or an error"
        )
        return f"{why}: {kinds_of(odd)}" if odd else None
    if any(_EXPERT.search(name) for name in shapes):
        return "it fails to stack experts that have scales of blocks"
    odd = [name for name, shape in shapes.items() if shape[1] % by.cols]
    why = f"without dequantize=True, its forward fails where columns are no multiple of {by.cols}"
    return f"{why}: {kinds_of(odd)}" if odd else None


def read_by(layout: Layout, shapes: Shapes) -> str:
    """The libraries that read a checkpoint, in words, and why Transformers does not."""
    engines = ["vLLM", "SGLang"] + ["TensorRT-LLM"] * (layout.name == "modelopt")
    if layout.name == "fine_grained" and layout.granularity != Blockwise(128, 128):
        engines = []
    reason = transformers_refuses(layout, shapes)
    readers = [] if reason else [f"{TRANSFORMERS} (tested on a CPU)"]
    readers += [f"{', '.join(engines)} (by their sources, not run)"] if engines else []
    found = f"read by {' and '.join(readers) or 'no library that is known'}"
    return f"{found}; not by {TRANSFORMERS}: {reason}" if reason else found
