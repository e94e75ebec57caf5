"""What aten operations mean on a `Float8Tensor`; importing this room registers them.

``views.py``: shape changes that the block allows; ``copies.py``: copies, casts and creation;
``matmul.py``: products; ``gradients.py``: what is done to gradients between backward and step.
Adding an op is one function with ``@implements(aten_overload)``, called as
``f(func, *args, **kwargs)``; it builds its result with ``_replace``, which keeps all metadata. What
is not registered raises an error that names the op and says ``.dequantize()``.
"""

from float8.tensor.dispatch import copies, gradients, matmul, views

__all__ = ["copies", "gradients", "matmul", "views"]
