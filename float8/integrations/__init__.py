"""Float8 by the means of other frameworks: a file, an extra of ``setup.py``, an example for each.

======================= ================================ =====================================
framework               import                           install
======================= ================================ =====================================
Hugging Face Accelerate ``.accelerate.prepare_float8``   ``pip install 'float8[accelerate]'``
Transformers Trainer    ``.transformers.Float8Callback`` ``pip install 'float8[transformers]'``
Lightning, Fabric       ``.lightning.Float8Precision``   ``pip install 'float8[lightning]'``
torchtitan              ``.torchtitan.Float8Converter``  ``pip install 'float8[torchtitan]'``
======================= ================================ =====================================

Nothing below imports this room, and importing ``float8`` imports none of the frameworks: each file
here imports its own, after `float8.integrations.versions` has said what is missing.
"""
