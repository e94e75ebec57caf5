"""The list of layers that stay in high precision, as readers understand it.

Readers do not compare whole names only. A name in the list that also stands for a layer in float8
would make a reader take that layer's codes for values, without an error. Such a list is refused
when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def checked_names(
    layers: Iterable[str],
    skipped: Iterable[str],
    stands_for: Callable[[str, str], bool],
    reader: str,
) -> list[str]:
    """The skipped names, sorted; ValueError if one of them stands for a layer in float8.

    ``stands_for(layer, skipped name)`` says whether a reader skips the layer for this name.
    ``reader`` says for the message which reader, and by what rule.
    """
    names = sorted(set(skipped))
    for layer in layers:
        for name in names:
            if stands_for(layer, name):
                raise ValueError(
                    f"{layer} is in float8 and {name} is not, but skipping {name} makes readers "
                    f"skip {layer} too ({reader}): leave {layer} in high precision, or take "
                    "another layout"
                )
    return names
