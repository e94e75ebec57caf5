"""Studies of training quality: many small trainings, compared in pairs.

``gpt_run.py``: the seed and the sizes of a run; ``run.py``: one training, decided by a `Run`;
``contenders.py``: what a run trains in; ``configs.py``: configs of float8 that have a name;
``study.py``: many runs, one process each, in a file that a later call continues; ``paired.py``:
differences between runs of one seed, and their confidence intervals; ``least_squares.py``: the same
of what many runs say together; ``segments.py``: a long training made in several runs.

The studies of ``bench_quality``, each with its runs and its table: ``recipes.py``; ``operands.py``,
with ``ablated.py`` (a layer whose casts are on or off) and ``probe.py`` (what they do to one step);
``rates.py``; ``scaling.py``. ``pictures.py`` draws their files.

Other studies:

- alarms: ``watched.py``, one training whose casts are watched, healthy or with a planted fault;
- a sudden change: ``shifts.py``, ``shifted_run.py``;
- an outlier of SwiGLU: ``outliers.py`` plants it; ``outlier_run.py``: one process of the study;
  ``outlier_picture.py``: the loss by its size;
- what follows pretraining: ``pretrained.py``: the models that runs start from; ``finetuning.py``:
  on another text, of all weights or of adapters; ``post_training.py``: conversion without training;
- models of other kinds: ``other_models.py``, one training of a model that ``tasks.py`` makes with
  its batches.
"""
