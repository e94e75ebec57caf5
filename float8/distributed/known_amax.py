"""`KnownAmax`: the largest magnitude of a weight, valid until the weight is written to.

Writes are found in three ways:

- Every operation on a `ShardedWeight` passes its ``__torch_dispatch__``, under DTensor too. The
  operations that write (an optimizer's step, a load, an initialisation) call `KnownAmax.forget`.
- Some writes bypass the dispatch: those of compiled code, and writes to the tensor that a
  checkpoint shares with the weight. They increase the version counter of the stored tensor. That
  counter alone does not suffice: an optimizer's step under FSDP2 leaves it unchanged.
- An optimizer's step that inductor compiled increases only the version counter of the parameter,
  so `KnownAmax.of` reads that one too.
"""

from __future__ import annotations

from torch import Tensor

from float8.linear.float8_weight import version_of


class KnownAmax:
    """The largest magnitude of a whole weight, shared by all views of one rank's shard of it.

    ``amax`` is float32, one number per block, or None. It is not rounded to a compute dtype:
    rounding is monotonic and may come later. It is the amax of ``source`` at version ``version``.
    ``is_zero`` is True while the memory has contained nothing but zeros.
    """

    def __init__(self, is_zero: bool = False) -> None:
        self.forget()
        self.is_zero = is_zero

    def forget(self) -> None:
        """Discard the amax, because the weight was written to."""
        self.amax: Tensor | None = None
        self.source: Tensor | None = None
        self.version = 0
        self.owner_version: int | None = None
        self.is_zero = False

    def remember(self, amax: Tensor, source: Tensor, owner_version: int | None = None) -> None:
        """Keep the amax of a stored tensor, with its version and that of the layer's parameters."""
        self.amax, self.source, self.version = amax, source, version_of(source)
        self.owner_version = owner_version

    def of(self, *owners: Tensor) -> Tensor | None:
        """``amax`` if neither the stored tensor nor its parameter was written to since; or None.

        ``owners`` are the parameters of the layer, the tensor's own among them; without any, only
        the stored tensor is compared.
        """
        if self.source is None or version_of(self.source) != self.version:
            return None
        is_current = not owners or self.owner_version in (None, sum(map(version_of, owners)))
        return self.amax if is_current else None
