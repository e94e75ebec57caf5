"""One script per question, each timed the same way (`harness.py`) and written down in `report.py`.

- `bench_matmul.py`: how much faster is a scaled float8 product than a bf16 one?
- `bench_linear.py`: what does a float8 linear layer cost, or gain, in a training step?

`shapes.py` names the layers whose sizes are measured; `results/` keeps what was measured where.
Each script runs as a file, from a checkout, without installation.
"""
