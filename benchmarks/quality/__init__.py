"""Studies of training quality: many small trainings, compared in pairs.

``run.py``: one training, decided by a `Run`; ``contenders.py``: what a run trains in; ``study.py``:
many runs, one process each, in a file that a later call continues; ``paired.py``: differences
between runs of one seed, and their confidence intervals; ``least_squares.py``: the same of what
many runs say together.

The studies of ``bench_quality``, each with its runs and its table: ``recipes.py``; ``operands.py``,
with ``ablated.py`` (a layer whose casts are on or off) and ``probe.py`` (what they do to one step);
``rates.py``; ``scaling.py``. ``pictures.py`` draws their files.

``watched.py``: one training whose casts are watched, healthy or with a planted fault.

What follows pretraining: ``pretrained.py``: the models that runs start from; ``finetuning.py``: on
another text, of all weights or of adapters; ``post_training.py``: conversion without training.
between runs of one seed, and their confidence intervals. ``other_models.py``: one training of a
model of another kind, which ``tasks.py`` makes with its batches.
"""
