"""L4: what float8 adds to torch.distributed; the engine stays torch's own.

``gathered_weights.py``: FSDP2 sends weights as float8 (`float8_gather` < `sharded_weight`).
Importing it fills registries of the rooms below; `float8.convert` has it imported when a config
asks for it.
"""
