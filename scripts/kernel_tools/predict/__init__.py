"""Predicts the time of a Triton kernel from its machine code, without a GPU.

``requests.py``: what one program reads and writes, and how often its loops run, from Triton's IR.
``instructions.py``: instructions by pipe, and loads that a program waits for, from SASS.
``devices.py``: the constants of each GPU, with their sources.
``traffic.py``: bytes from device memory and from L2.
``model.py``: the formula. ``launches.py``: how many programs a multiprocessor holds, and the
prediction of a launch.

A prediction is not a measurement. `benchmarks/results/predicted_kernels.json` holds all of them.
"""
