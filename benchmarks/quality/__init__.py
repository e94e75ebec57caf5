"""Studies of training quality: many small trainings, compared in pairs.

- ``study.py``: many runs, a process each, in a file that a later call continues
- ``training.py``: the training loop, its optimizer and its evaluation
- ``contenders.py``: the arithmetic that a model trains in
- ``intervals.py``: paired differences, least squares, and confidence intervals

The question of a study, its runs and its table are in ``benchmarks/bench_NAME.py``.
"""
