"""L1: ops on plain tensors. This room knows no Float8Tensor, no module and no config.

``reference.py`` defines every op in plain PyTorch, to the bit where bits are defined, and is the
path that runs where there is no float8 hardware. ``scaled_mm.py`` chooses between it and the
tensor cores, and explains refusals. A faster kernel is one file here and one candidate there.

May import: ``float8.granularity``, ``float8.formats``, torch.
"""

from float8.kernels.reference import MIN_SCALE, amax, cast, dequantize, scale_from_amax
from float8.kernels.scaled_mm import prepare, scaled_mm

__all__ = ["MIN_SCALE", "amax", "cast", "dequantize", "prepare", "scale_from_amax", "scaled_mm"]
