"""Parts of the benchmarks that are shared.

- `harness.py`, `report.py`: timing in turns; tables and JSON
- `alone.py`: one contender in a process of its own, for its peak memory
- `step.py`: a training step, what it saves and launches; `contenders.py`: the layers compared
- `stubbed_gpu.py`: the host's part of a CUDA step, without a GPU
- `shapes.py`: the products compared; `memory.py`: bytes held in training
- `picture.py`: colours and files of figures
"""
