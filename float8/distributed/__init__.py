"""The parts of float8 that use torch.distributed.

- ``gathered_weights.py``: FSDP2 gathers weights as float8 (`float8_gather` < `sharded_weight`;
  `replaced_parameters`). Imported when a config asks for it.
- ``tensor_parallel.py``: activations of tensor-parallel layers travel as float8
  (`parallel_linear`).
- ``expert_parallel.py``: tokens travel to the ranks of their experts as float8
  (`token_exchange`).
- ``rank_comparison.py``: ranks that exchange float8 values hold the same layers, or get an error
  that names the first difference.
- ``gradients.py``: gradients travel as float8 (`gradient_reduction`).
"""
