"""MS-AMP's levels: float8 weights, gradients, optimizer states and communication together.

``float8.ms_amp`` is this package and the function that it exports: the package can be called.
"""

import sys
from types import ModuleType

from float8.ms_amp.ms_amp import _AfterLoad, ms_amp  # noqa: F401  pickles name both here

__all__ = ["ms_amp"]


class _CallablePackage(ModuleType):
    __call__ = staticmethod(ms_amp)


sys.modules[__name__].__class__ = _CallablePackage
