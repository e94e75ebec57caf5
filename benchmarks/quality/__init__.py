"""Studies of training quality: many small trainings, compared in pairs.

- ``study.py``: many runs, one process each, in a file that a later call continues
- ``paired.py``: differences between runs of one seed, least squares, and confidence intervals
- ``run.py``: one training of the GPT, decided by a `Run`; ``contenders.py``: what it trains in
- ``recipes.py``, ``pictures.py``: the table and the figure of ``bench_quality``
- ``watched.py``: a training whose casts are watched, healthy or with a planted fault
- ``outliers.py``, ``outlier_run.py``: an outlier of SwiGLU, and one process of that study
- ``segments.py``: a long training made in several runs
"""
