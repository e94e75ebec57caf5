"""Which layers read the result of a norm: as declared, or by the order of an ``nn.Sequential``.

Declarations are names. A pattern's ``*`` stands for one part of a name; a star in a layer's pattern
stands for the same part as the norm's star::

    {"layers.*.input_norm": ["layers.*.attention.q", "layers.*.attention.k"]}

In an ``nn.Sequential`` each module reads the result of the one before it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from torch import nn

Pairs = Mapping[str, str | Sequence[str]]

NORM_PAIRS: dict[type[nn.Module], Pairs] = {}  # filled by users; `fuse_norms` reads it


def register_norm_pairs(block_type: type[nn.Module], pairs: Pairs) -> None:
    """Declare which layers read the norms of every module of exactly this type.

    Args:
        block_type: such as a decoder layer.
        pairs: norm -> layer or layers, as `fuse_norms` takes them, by their names in the block:
            ``{"norm1": ["attention.q", "attention.k", "attention.v"], "norm2": "mlp.up"}``.
    """
    NORM_PAIRS[block_type] = dict(pairs)


def readers_of_norms(
    model: nn.Module, pairs: Pairs, is_norm: Callable[[nn.Module], bool]
) -> tuple[dict[nn.Module, dict[nn.Module, None]], dict[nn.Module, str]]:
    """Norm -> the layers that read it, in order and as far as they are known.

    Pairs of a block's type replace what an ``nn.Sequential`` says about modules that are norms by
    ``is_norm``; ``pairs``, which are for this model, replace both. They raise the errors of
    `resolved`. The second result says, by block, why the pairs of its type do not fit it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    counts = Counter(modules.values())
    declared: dict[str, list[str]] = {}
    readers: dict[nn.Module, dict[nn.Module, None]] = {}
    problems: dict[nn.Module, str] = {}
    for fqn, block in modules.items():
        if type(block) is nn.Sequential and "forward" not in block.__dict__:
            for norm, reader in pairwise(block):
                # Something else may call a module that has a second name.
                if is_norm(norm) and counts[norm] == 1:
                    readers[norm] = {reader: None}
        if type(block) in NORM_PAIRS:
            try:
                declared |= resolved(modules, NORM_PAIRS[type(block)], f"{fqn}." if fqn else "")
            except ValueError as error:
                problems[block] = f"its pairs, of {type(block).__name__}: {error}"
    found: dict[nn.Module, dict[nn.Module, None]] = {}
    for fqn, layers in (declared | resolved(modules, pairs)).items():
        known = found.setdefault(modules[fqn], {})  # a norm may have two names
        known |= dict.fromkeys(modules[name] for name in layers)
    return readers | found, problems


def resolved(names: Iterable[str], pairs: Pairs, prefix: str = "") -> dict[str, list[str]]:
    """Norm -> layers, for every name that a pattern of ``pairs`` matches.

    ``names`` are those of all modules of the model. ``pairs`` maps a norm's pattern to a layer's,
    or to several. ``prefix`` is the name of the module that the patterns start from, with a dot, or
    "". Raises ValueError for a pattern that matches nothing.
    """
    known, found = dict.fromkeys(names), dict[str, list[str]]()
    for pattern, value in pairs.items():
        layers = [value] if isinstance(value, str) else value
        expression = re.compile(re.escape(prefix + pattern).replace(r"\*", "([^.]*)"))
        matches = [match for name in known if (match := expression.fullmatch(name))]
        # A star that has no star of the norm to stand for stays, and is in no layer's name.
        by_norm = {
            match[0]: [prefix + functools.reduce(_filled, match.groups(), name) for name in layers]
            for match in matches
        }
        readers = [name for names in by_norm.values() for name in names]
        missing = [name for name in readers if name not in known]
        if missing or not matches:
            what = f"layer {missing[0]!r}" if missing else f"norm {prefix + pattern!r}"
            raise ValueError(f"norm pair {pattern!r}: the model has no {what}")
        found |= by_norm
    return found


def _filled(layer: str, star: str) -> str:
    return layer.replace("*", star, 1)
