"""One script per question, each timed the same way (`harness.py`) and written down in `report.py`.

- `bench_matmul.py`: how much faster is a scaled float8 product than a bf16 one?
- `bench_casts.py`: what does it cost to make float8 of an operand?
- `bench_linear.py`: what does a float8 linear layer cost, or gain, in a training step?
- `bench_model.py`: what is left of that in a whole model, and how much memory does it save?
- `bench_overhead.py`: what does the library itself cost, where the work is too small to hide it?
- `bench_unit.py`: what does recipe `unit` gain over scales that are measured?
- `bench_mup_transfer.py`: does the best learning rate of a narrow model hold for a wide one?
- `bench_memory.py`: how much memory do float8 states, activations and weights save in training, and
  does the loss stay?
- `bench_bert.py`: does a unit-scaled BERT train in float16 and float8 as in float32?

What they share: `shapes.py` names the layers whose sizes are measured, `contenders.py` those who
take part, `step.py` is what one training step does and leaves behind, `plots.py` draws. What the
numbers are read against: `limit.py` (how fast could it be), `floor.py` (what emulation cannot
avoid), `targets.py` (what it should gain), `by_hand.py` (the same layer without the library).
`llama.py` is the model whose speed and memory are measured; `memory.py` counts bytes, with a GPU or
without, `savers.py` lists who takes part in that, and `demo_runs.py` has the demo GPT do so. The
benchmarks of quality train `decoders.py` and `bert.py` by `training.py`; `stability.py` looks at
activations afterwards, and `traffic.py` adds up what casts would move on CUDA. `results/` keeps
what was measured where.

Each script runs as a file, from a checkout, without installation.
"""
