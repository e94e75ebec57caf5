"""Unit-scaled modules: ``torch.nn``'s, whose forward calls `float8.unit_scaling.functional`.

Weights start from N(0, 1) and biases from 0; what ``torch.nn`` puts into the initialisation (a
standard deviation of ``1 / sqrt(fan_in)``) is a factor of the product here. So every weight,
activation and gradient has a standard deviation of about 1 when training starts, and the range of
float8 is all theirs (unit scaling, arXiv 2303.11257; u-muP, arXiv 2407.17465, table 2).

`layers` have weights, `activations` have none, `norms` normalise; `rotary`, `attention`, `depth`
and `transformer` make models of them.
"""
