"""Benchmarks: one script per question, timed and reported alike.

Times, on a GPU or a CPU:

- `bench_matmul.py`: how much faster is a scaled float8 GEMM than a bf16 one?
- `bench_casts.py`: what does a cast to float8 cost?
- `bench_linear.py`, `bench_grouped_mm.py`: what does a float8 linear layer, or a grouped GEMM of
  experts, cost or gain in a training step?
- `bench_model.py`: how much of that remains in a whole model, and how much memory does it save?
  What does recipe `unit` gain over scales that are measured (``--unit``)?
- `bench_training.py`: does a training end at the loss of bf16, and how much sooner?
- `bench_optim.py`: what does an optimizer step with float8 states cost?
- `bench_numerics.py`: what does inspecting a training cost?
- `measure_device.py`, `check_estimate.py`: figures of this machine for `float8.estimate`; how
  accurate are its predictions?

`gpu.py` is the queue of what is not measured on a GPU yet, or is stale: it calls these scripts.

Bytes and errors, which need no GPU:

- `bench_memory.py`: how much memory do float8 states, activations and weights save in training?
- `bench_rollout.py`: do token probabilities agree with those of an engine that reads the file?

Studies of training quality, each many small trainings (`quality/study.py`):

- `bench_quality.py`: how much worse than bf16 does a model end in each recipe?
- `bench_alarms.py`: do alarms stay silent in healthy trainings, and start soon after a fault?
- `bench_mup_transfer.py`: does the best learning rate of a narrow model hold for a wide one?

`figures.py` draws result files. `measuring/` is shared by the scripts, `models/` contains the
model that they train and its text, and `results/` keeps what was measured where. Each script runs
as a file, from a checkout, without installation. Nothing here imports `scripts/`, nor the other
way round.
"""
