"""Filters for ``convert_to_float8_training(module_filter_fn=...)``: which layers to convert.

A filter is called as ``filter(module, fqn)`` with a candidate, a linear layer or experts, and its
name in the model, and returns True to convert it. Any function will do; those below also tell the
conversion report why they leave a layer out. For the usual cases::

    convert_to_float8_training(
        model, module_filter_fn=all_of(skip_names("lm_head"), min_features(256, 256))
    )

``filter_fqns`` of torchao and torchtitan are substrings of names; the patterns of `skip_names` are
whole names. ``filter_fqns=["output"]`` becomes ``skip_names("*output*")``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from float8.arguments import check_type, did_you_mean
from float8.config import Float8LinearConfig
from float8.linear.module import stacked_weights
from float8.linear.resident import contraction_last

__all__ = ["all_of", "divisible_by", "min_features", "min_size", "skip_names"]

ModuleFilter = Callable[[nn.Module, str], bool]
"""(module, its name in the model) -> whether to convert it."""
Reason = Callable[[nn.Module, str], str | None]
"""(module, its name in the model) -> why it is not converted."""
NO_REASON = "module_filter_fn returned False"
# The config of a conversion -> a filter; together they choose where a user gives no filter.
DEFAULT_FILTERS: list[Callable[[Float8LinearConfig], ModuleFilter]] = []


@dataclass(frozen=True)
class Because:
    """A filter that tells the conversion report why it leaves a layer out.

    Attributes:
        reason: (module, its name) -> why it is left out, or None to convert it.
        patterns: those of `skip_names`, which a conversion compares with the layers that there are.
    """

    reason: Reason
    patterns: tuple[str, ...] = ()

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        return self.reason(module, fqn) is None


def why_not(module_filter_fn: ModuleFilter, module: nn.Module, fqn: str) -> str | None:
    """The reason why a filter leaves this layer out, or None if it converts it.

    Each filter is called once, also within `all_of`: a user's may count or record its calls.
    """
    if isinstance(module_filter_fn, Because):
        return module_filter_fn.reason(module, fqn)
    return None if module_filter_fn(module, fqn) else NO_REASON


def skip_names(*patterns: str) -> ModuleFilter:
    """Skip layers whose name matches a shell pattern (``*`` also crosses dots).

    A pattern without wildcards also skips everything below that name. Names are whole, as in
    ``named_modules()``: write ``*lm_head`` where the head is ``model.lm_head``. A substring, as in
    torchao's ``filter_fqns``, is ``*substring*``. The report of the conversion
    (``model.float8_conversion``) names patterns that match no layer.

    Args:
        patterns: names of layers, or patterns of them.

    Raises:
        TypeError: a pattern is not a string.
    """
    for pattern in patterns:
        check_type(pattern, str, "skip_names", "each pattern", "a string, as in skip_names(*names)")

    def reason(module: nn.Module, fqn: str) -> str | None:
        found = next((p for p in patterns if _matches(p, fqn)), None)
        return None if found is None else f"left out by skip_names({found!r})"

    return Because(reason, patterns)


def min_size(weight_elements: int) -> ModuleFilter:
    """Skip layers whose weight has fewer elements: small GEMMs gain less than their casts cost.

    Args:
        weight_elements: ``in_features * out_features`` of the smallest layer to convert.
    """
    return _by_sizes(
        lambda K, N: weight_elements <= K * N, f", and min_size is {weight_elements:,}"
    )


def min_features(in_features: int = 0, out_features: int = 0) -> ModuleFilter:
    """Skip layers with fewer input or output features.

    Args:
        in_features: of the smallest layer to convert.
        out_features: of the smallest layer to convert.
    """
    return _by_sizes(
        lambda K, N: in_features <= K and out_features <= N,
        f", and min_features is {in_features} and {out_features}",
    )


def divisible_by(multiple: int = 16) -> ModuleFilter:
    """Skip layers with a dimension that is no multiple of this.

    Args:
        multiple: what ``in_features`` and ``out_features`` must be multiples of.
    """
    return _by_sizes(
        lambda K, N: K % multiple == 0 == N % multiple, f": not multiples of {multiple}"
    )


def _by_sizes(fits: Callable[[int, int], bool], why: str) -> ModuleFilter:
    """A filter by (in_features, out_features); of experts, those of each stack."""

    def reason(module: nn.Module, fqn: str) -> str | None:
        features = _features(module)
        if all(fits(K, N) for K, N in features):
            return None
        return " and ".join(f"in_features={K}, out_features={N}" for K, N in features) + why

    return Because(reason)


def all_of(*filters: ModuleFilter) -> ModuleFilter:
    """Convert a layer only if every filter says so.

    Args:
        filters: called in this order, until one returns False.
    """

    def reason(module: nn.Module, fqn: str) -> str | None:
        reasons = (why_not(f, module, fqn) for f in filters)
        return next((reason for reason in reasons if reason is not None), None)

    return Because(reason, sum((f.patterns for f in filters if isinstance(f, Because)), ()))


def chosen_by_default(config: Float8LinearConfig) -> ModuleFilter:
    """What conversion for training takes where the user gives no filter."""
    return all_of(*(make(config) for make in DEFAULT_FILTERS))


def unmatched_patterns(module_filter_fn: object, names: Iterable[str]) -> list[str]:
    """The patterns of a filter's `skip_names` that match no layer, with the nearest name.

    ``names`` are those of all layers, converted or not. A filter that is a function of the user's
    has no patterns.
    """
    names, patterns = list(names), getattr(module_filter_fn, "patterns", ())
    missed = [p for p in patterns if not any(_matches(p, name) for name in names)]
    return [f"{pattern!r}{did_you_mean(pattern, names)}" for pattern in missed]


def _matches(pattern: str, fqn: str) -> bool:
    return fnmatch.fnmatchcase(fqn, pattern) or fqn.startswith(pattern + ".")


def _features(module: Any) -> list[tuple[int, int]]:
    """(in_features, out_features) of a linear layer, or of each stack of experts."""
    shapes = [contraction_last(module, w).shape for w in stacked_weights(module).values()]
    return [(K, N) for _, N, K in shapes] or [(module.in_features, module.out_features)]
