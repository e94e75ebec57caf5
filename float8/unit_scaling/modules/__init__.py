"""Unit-scaled modules: ``torch.nn``'s, whose forward calls `float8.unit_scaling.functional`.

Weights start from N(0, 1) and biases from 0. The standard deviation ``1 / sqrt(fan_in)`` of
``torch.nn``'s initialisation is a factor of the product here. So every weight, activation and
gradient has a standard deviation of about 1 when training starts (unit scaling, arXiv 2303.11257;
u-muP, arXiv 2407.17465, table 2). Arguments that docstrings do not describe are ``torch.nn``'s.

`layers`: the modules of ``torch.nn``, and the float8 layers that `convert_to_float8_training` makes
of them; `transformer`: models and their parts.
"""
