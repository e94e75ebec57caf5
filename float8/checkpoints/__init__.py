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

How a float8 weight is stored is a `Layout`, one file each: ``fine_grained.py`` (the 128x128 blocks
of DeepSeek-V3), ``compressed_tensors.py`` (per tensor, channel or block, and MX), ``modelopt.py``
(per tensor, static inputs). It converts a `Float8Tensor` to named tensors and back, and reads
neither files nor modules. A new layout is its file and its row in ``layouts.LAYOUTS``.

``layout.py``, ``layer_checks.py``, ``skipped_names.py`` < the layouts < ``layouts.py``;
``shards.py``, ``new_folder.py`` < ``shard_writer.py``: files, no layouts; ``readers.py`` (which
libraries read a layout) < ``model_layout.py``, ``inspection.py``; ``weights.py``: what each
entry of a model becomes, over ``stacks.py`` (names and experts as published checkpoints have them),
``float8_layers.py`` (which layers are in float8), ``weight_cast.py`` (with which bits),
``input_scale.py`` and ``model_layout.py`` < ``ranks.py``, ``finite.py``, ``model_config.py`` <
``save.py``, ``live.py``; ``source.py`` (the weights of a checkpoint) < ``matching.py`` (where they
go in a model), ``parameters.py`` (writing them there), ``resident.py`` (layers that keep them) <
``loading.py``; ``source.py`` < ``inspection.py`` < ``comparison.py``, ``rewriting.py`` (which also
imports ``weights.py``) < ``__main__.py``.
"""

from float8.checkpoints.compressed_tensors import CompressedTensors
from float8.checkpoints.fine_grained import FineGrained
from float8.checkpoints.live import weight_updates
from float8.checkpoints.loading import load
from float8.checkpoints.modelopt import ModelOpt
from float8.checkpoints.save import save_pretrained
from float8.checkpoints.save_plan import SavePlan, plan_save

__all__ = [
    "CompressedTensors",
    "FineGrained",
    "ModelOpt",
    "SavePlan",
    "load",
    "plan_save",
    "save_pretrained",
    "weight_updates",
]
