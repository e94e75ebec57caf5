"""L4: what float8 adds to torch.distributed; the engine stays torch's own.

- ``gathered_weights.py``: FSDP2 sends weights as float8 (`known_amax` < `float8_gather` <
  `sharded_weight`, `replaced_parameters`). `float8.convert` has it imported when a config asks.
- ``tensor_parallel.py``: activations of tensor-parallel layers travel as float8 (`shards` <
  `exchange` < `parallel_linear`).
- ``first_use.py``: ranks that train one model hold the same layers, or are told where they differ
  (`rank_comparison` < `agreement` < `first_use`).
- ``gradients/``: gradients travel as float8 (`float8_gradients`).
"""
