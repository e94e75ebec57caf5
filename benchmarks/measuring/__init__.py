"""Parts of the benchmarks that are shared.

- `harness.py`, `report.py`: timing in turns, tables and JSON
- `shapes.py`, `step.py`: the measured layers; a training step, what it saves and launches
- `contenders.py`, `floor.py`, `limit.py`, `targets.py`: the layers compared; lower bounds of time,
  emulated and on a GPU; the speed-ups to reach
- `memory.py`, `savers.py`: bytes held in training, and the options that reduce them
- `traffic.py`, `wire.py`, `stability.py`: bytes moved by casts, bytes sent by a rank, activations
  after training
"""
