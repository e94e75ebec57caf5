"""`Float8Tensor`, the tensor that carries float8 data, its scale and its format, and its aten ops.

``tensor.py``: the class; ``dispatch/``: what each aten op means on it, registered when this package
is imported; ``shard.py``: what FSDP2 stores of a frozen one.
"""

from float8.tensor import dispatch as _dispatch  # noqa: F401  registers the aten ops
from float8.tensor.shard import Float8Shard as Float8Shard
from float8.tensor.tensor import Float8Tensor, _rebuild  # noqa: F401  pickles name both here

__all__ = ["Float8Tensor"]
