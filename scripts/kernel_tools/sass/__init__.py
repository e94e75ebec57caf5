"""Analyses machine code of NVIDIA GPUs: the possible origins of each byte that a kernel stores.

``kinds.py`` < ``instructions.py`` < ``effects.py`` < ``flow.py`` < ``findings.py``: sets of kinds
of a byte; a line of a listing; what an instruction does to the bytes of its registers; the
control-flow graph and the sets at every point of it; the stores whose bytes may be garbage.
``tools.py`` runs the disassembler that comes with Triton.

`scripts.kernel_tools report` scans the kernels that ship, `scripts.kernel_tools scan` any file.
"""
