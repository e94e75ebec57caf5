"""`KnownAmax`: the largest magnitude of a weight, for as long as nobody writes to the weight.

Who writes? Every operation on a `ShardedWeight` passes its ``__torch_dispatch__``, under DTensor
too: an optimizer's step, a load, an initialisation; one that writes calls `KnownAmax.forget`. What
goes past it, compiled code or a write to the tensor that a checkpoint shares with the weight, is
seen by the version counter of the stored tensor. (That counter alone would not do: it stands still
in an optimizer's step under FSDP2.) An optimizer's step that inductor compiled moves the counter of
the parameter alone, so that is asked too (`KnownAmax.of`).
"""

from __future__ import annotations

from torch import Tensor

from float8.linear.float8_weight import version_of


class KnownAmax:
    """The largest magnitude of a whole weight, shared by all views of one rank's shard of it.

    ``amax`` is (1, 1) float32, or None, and not rounded to a compute dtype: rounding is monotonic
    and may come later. It was found in ``source`` when that had been written to ``version`` times.
    ``is_zero`` says that the memory has held nothing but zeros so far.
    """

    def __init__(self, is_zero: bool = False) -> None:
        self.forget()
        self.is_zero = is_zero

    def forget(self) -> None:
        """The weight was written to."""
        self.amax: Tensor | None = None
        self.source: Tensor | None = None
        self.version = 0
        self.owner_version: int | None = None
        self.is_zero = False

    def remember(self, amax: Tensor, source: Tensor, owner_version: int | None = None) -> None:
        """Note what was found in a stored tensor, whose parameter had a version."""
        self.amax, self.source, self.version = amax, source, version_of(source)
        self.owner_version = owner_version

    def of(self, owner: Tensor) -> Tensor | None:
        """``amax`` if it still holds for a parameter."""
        is_as_it_was = self.owner_version in (None, version_of(owner))
        return self.current if is_as_it_was else None

    @property
    def current(self) -> Tensor | None:
        """``amax`` if it still holds."""
        if self.source is None or version_of(self.source) != self.version:
            return None
        return self.amax
