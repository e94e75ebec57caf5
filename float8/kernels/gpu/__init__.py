"""The Triton kernels: one file per op, on plain CUDA tensors, with the bits of ``definition.py``.

Importing a file registers its ops as ``torch.ops.float8.*`` (see ``launch.py``). Nothing here is
imported until a CUDA tensor needs it: Triton costs half a second, and laptops may not have it.
"""
