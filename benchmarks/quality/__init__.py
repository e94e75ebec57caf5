"""Studies of training quality: many small trainings, compared in pairs.

``run.py``: one training, decided by a `Run`; ``contenders.py``: what a run trains in; ``study.py``:
many runs, one process each, in a file that a later call continues; ``segments.py``: a long training
made in several runs; ``paired.py``: differences between runs of one seed, and their confidence
intervals.
"""
