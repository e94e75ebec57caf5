"""Which layers read the result of a norm: as declared, or by the order of an ``nn.Sequential``.

Declarations are names. A pattern's ``*`` stands for one part of a name; a star in a layer's pattern
stands for the same part as the norm's star::

    {"layers.*.input_norm": ["layers.*.attention.q", "layers.*.attention.k"]}

In an ``nn.Sequential`` each module reads the result of the one before it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
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

    Raises:
        ValueError: the type has pairs already.
    """
    if block_type in NORM_PAIRS:
        raise ValueError(f"{block_type.__name__} has norm pairs already")
    NORM_PAIRS[block_type] = dict(pairs)


def declared_readers(model: nn.Module, pairs: Pairs) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Norm -> the layers that are declared to read it, by the first name of each.

    ``pairs`` are for this model, and replace those of a block's type; they raise the errors of
    `resolved`. The second result says, by name of a block, why the pairs of its type do not fit it.
    """
    every = dict(model.named_modules(remove_duplicate=False))
    first = {module: fqn for fqn, module in model.named_modules()}
    found: dict[str, list[str]] = {}
    problems: dict[str, str] = {}
    for fqn, block in model.named_modules():
        if type(block) in NORM_PAIRS:
            try:
                found |= resolved(every, NORM_PAIRS[type(block)], f"{fqn}." if fqn else "")
            except ValueError as error:
                problems[fqn] = f"its pairs, of {type(block).__name__}: {error}"
    found |= resolved(every, pairs)
    readers: dict[str, dict[str, None]] = {}
    for fqn, layers in found.items():  # a norm of two names has the readers of both
        known = readers.setdefault(first[every[fqn]], {})
        known |= dict.fromkeys(first[every[name]] for name in layers)
    return {fqn: list(layers) for fqn, layers in readers.items()}, problems


def next_in_sequential(model: nn.Module) -> dict[str, list[str]]:
    """Module -> the module behind it in the ``nn.Sequential`` that has it, and that alone."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(fqn)
    found: dict[str, list[str]] = {}
    for block in model.modules():
        if type(block) is nn.Sequential and "forward" not in block.__dict__:
            children = list(block)
            for child, reader in pairwise(children):
                if len(names[child]) == 1:
                    found[names[child][0]] = [names[reader][0]]
    return found


def resolved(names: Iterable[str], pairs: Pairs, prefix: str = "") -> dict[str, list[str]]:
    """Norm -> layers, for every name that a pattern of ``pairs`` matches.

    ``names`` are those of all modules of the model. ``pairs`` maps a norm's pattern to a layer's,
    or to several. ``prefix`` is the name of the module that the patterns start from, with a dot, or
    "". Raises TypeError for a pattern that is no string, and ValueError for one that matches
    nothing or has more stars than its norm's.
    """
    known, found = list(names), dict[str, list[str]]()
    for pattern, value in pairs.items():
        layers = [value] if isinstance(value, str) else list(value)
        if not all(isinstance(each, str) for each in (pattern, *layers)):
            raise TypeError(f"norm pairs are names, got {pattern!r}: {layers!r}")
        expression = re.compile(re.escape(prefix + pattern).replace(r"\*", "([^.]*)"))
        matches = [match for name in known if (match := expression.fullmatch(name))]
        if not matches:
            raise ValueError(_unknown("norm", prefix + pattern, known))
        for match in matches:
            readers = [_filled(prefix + each, prefix + pattern, match.groups()) for each in layers]
            for reader in readers:
                if reader not in known:
                    raise ValueError(_unknown(f"layer (of {match[0]})", reader, known))
            found[match[0]] = readers
    return found


def _filled(layer: str, norm: str, stars: Sequence[str]) -> str:
    if layer.count("*") > len(stars):
        raise ValueError(f"pair {norm!r}: {layer!r} has more stars, which would match anything")
    parts = layer.split("*")
    return parts[0] + "".join(star + part for star, part in zip(stars, parts[1:], strict=False))


def _unknown(what: str, pattern: str, known: list[str]) -> str:
    near = difflib.get_close_matches(pattern, known, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"the model has no {what} {pattern!r}{hint}"
