"""Studies of training quality: many small trainings, compared in pairs.

``run.py``: one training, decided by a `Run`; ``contenders.py``: what a run trains in; ``study.py``:
many runs, one process each, in a file that a later call continues; ``paired.py``: differences
between runs of one seed, and their confidence intervals; ``watched.py``: one training whose casts
are watched, healthy or with a planted fault.
"""
