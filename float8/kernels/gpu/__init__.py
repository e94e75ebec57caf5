"""The Triton kernels, on plain CUDA tensors, with the bits of ``definition.py``.

All casts share the kernel of ``tiles.py``; other ops have one file each, with their kernels.
Importing a file registers its ops as ``torch.ops.float8.*`` (see ``launch.py``). Nothing here is
imported until a CUDA tensor needs it: importing Triton takes half a second, and it may be missing.
"""
