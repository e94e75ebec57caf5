"""Mixtures of experts: the grouped GEMMs of their layers in float8.

`grouped_mm.py` is the functional form, `float8.grouped_mm`, with its autograd function, which has
the plans and the casts of weights of the linear layer. `modules.py` converts modules whose forward
calls ``grouped_mm``; `other_libraries.py` knows those of Transformers and torchtitan.

May import: ``float8.linear`` and what is below it.
"""
