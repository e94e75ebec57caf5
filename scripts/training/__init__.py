"""Parts of the training scripts.

- `gpt.py`: the demo's GPT in a recipe; model and text are those of `benchmarks/models`
- `options.py`, `savings.py`: the options of a training
- `parallel.py`, `sharded.py`, `ctrl_c.py`, `environment.py`: processes, interruption, records
- `curves.py`: the picture of a demo
- `half_products.py`: bf16 and fp16 GEMMs at float32 speed on CPUs without such units
"""
