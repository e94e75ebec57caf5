"""Studies of training quality: many small trainings, compared in pairs.

``run.py``: one training, decided by a `Run`; ``contenders.py``: what a run trains in; ``study.py``:
many runs, one process each, in a file that a later call continues; ``paired.py``: differences
between runs of one seed, and their confidence intervals. ``other_models.py``: one training of a
model of another kind, which ``tasks.py`` makes with its batches.
"""
