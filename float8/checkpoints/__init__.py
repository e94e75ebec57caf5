"""Float8 checkpoints in the formats of other libraries: written, read, and sent to an engine.

Models here have float8 weights with scales. vLLM, SGLang and transformers read files of float8
weights with scales, under other names and in other shapes. This package writes such files, and
reads published ones as a base to train on.

- `save_pretrained` writes a folder: safetensors shards, their index, and a ``config.json`` whose
  ``quantization_config`` says how to read them. `plan_save` says what would be written.
- `load` reads such a folder into a model, as plain weights, resident float8 weights, or weights
  that train with the file's scales.
- `weight_updates` yields the same tensors, one at a time, from the weights as they are now.
- ``python -m float8.checkpoints`` inspects, converts and compares folders.

How a float8 weight is stored is a `Layout`, a class each in ``layouts.py``: `FineGrained` (the
128x128 blocks of DeepSeek-V3), `CompressedTensors` (per tensor, channel or block, and MX),
`ModelOpt` (per tensor, static inputs), ``"mxfp4"`` and ``"gpt_oss"`` (packed 4-bit weights). It
says once what a file has of a layer (``Layout.parts``), from which a `Float8Tensor` becomes named
tensors and comes back. A new layout is its class and its row in ``LAYOUTS``. safetensors reads and
writes the files (``files.py``), so this package needs the extra ``checkpoints``.

``files.py``, ``layouts.py`` < ``source.py`` (the weights of a checkpoint), ``casts.py`` (with which
bits a layer is stored) < ``plan.py`` (what will be written, and its tensors one by one). A model:
``names.py`` (names and experts as published checkpoints have them), ``plan.py`` < ``weights.py``
(what each parameter becomes) < ``save.py``; and ``source.py``, ``names.py`` < ``loading.py``. Files
alone: ``source.py``, ``plan.py`` < ``rewriting.py`` < ``__main__.py``.
"""

from float8.checkpoints.layouts import CompressedTensors, FineGrained, ModelOpt
from float8.checkpoints.loading import load
from float8.checkpoints.save import plan_save, save_pretrained, weight_updates

__all__ = [
    "CompressedTensors",
    "FineGrained",
    "ModelOpt",
    "load",
    "plan_save",
    "save_pretrained",
    "weight_updates",
]
