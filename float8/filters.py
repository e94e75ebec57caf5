"""Ready-made answers to "which layers?" for ``convert_to_float8_training(module_filter_fn=...)``.

A filter is called as ``filter(module, fqn)`` with a candidate layer and its name in the model, and
returns True to convert it. Any function will do; these cover what people write by hand::

    convert_to_float8_training(
        model, module_filter_fn=all_of(skip_names("lm_head", "*.gate"), divisible_by(16))
    )
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

from torch import nn

ModuleFilter = Callable[[nn.Module, str], bool]


def skip_names(*patterns: str) -> ModuleFilter:
    """Skip layers whose name matches a shell pattern (``*`` also crosses dots).

    A pattern without wildcards also skips everything below that name. Names are whole, as in
    ``named_modules()``: write ``*lm_head`` where the head is ``model.lm_head``.
    """
    return lambda module, fqn: (
        not any(
            fnmatch.fnmatchcase(fqn, pattern) or fqn.startswith(pattern + ".")
            for pattern in patterns
        )
    )


def min_size(weight_elements: int) -> ModuleFilter:
    """Skip layers whose weight has fewer elements: small products do not repay their casts."""
    return lambda module, fqn: _features(module)[0] * _features(module)[1] >= weight_elements


def min_features(in_features: int = 0, out_features: int = 0) -> ModuleFilter:
    """Skip layers with fewer input or output features."""
    return lambda module, fqn: (
        _features(module)[0] >= in_features and _features(module)[1] >= out_features
    )


def divisible_by(multiple: int = 16) -> ModuleFilter:
    """Skip layers with a dimension that is no multiple of 16, which tensor cores do not take."""
    return lambda module, fqn: all(size % multiple == 0 for size in _features(module))


def all_of(*filters: ModuleFilter) -> ModuleFilter:
    """Convert a layer only if every filter says so."""
    return lambda module, fqn: all(f(module, fqn) for f in filters)


def _features(module: nn.Module) -> tuple[int, int]:
    return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
