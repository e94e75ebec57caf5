"""The aten operations of `Float8Tensor`; importing this package registers them.

- ``views.py``: shape changes that the block allows;
- ``copies.py``: copies, casts and creation;
- ``matmul.py``: matrix products;
- ``gradients.py``: operations on gradients between backward and step.

To add an op, write one function with ``@implements(aten_overload)``. It is called as
``f(func, *args, **kwargs)`` and builds its result with ``_replace``, which keeps all metadata. An
op that is not registered raises an error that names it and proposes ``.dequantize()``.
"""

from float8.tensor.dispatch import copies, gradients, matmul, views

__all__ = ["copies", "gradients", "matmul", "views"]
