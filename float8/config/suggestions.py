"""What the user may have meant: the known name that is nearest to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'rowwise'?"``, or nothing where no known name is near.

    Args:
        name: what was given.
        known: what there is.
    """
    spelt = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), spelt, n=1)
    return f"; did you mean {spelt[near[0]]!r}?" if near else ""
