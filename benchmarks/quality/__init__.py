"""Studies of training quality: many small trainings, compared in pairs.

``run.py``: one training, decided by a `Run`; ``contenders.py``: what a run trains in; ``study.py``:
many runs, one process each, in a file that a later call continues; ``paired.py``: differences
between runs of one seed, and their confidence intervals.

An outlier of SwiGLU: ``outliers.py`` plants it; ``outlier_base.py``: the model that has it;
``outlier_contenders.py``: what it is trained in; ``outlier_run.py``: one process of the study;
``outlier_picture.py``: the loss by its size.
"""
