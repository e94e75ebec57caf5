"""Other libraries: training frameworks, and other libraries' configs.

======================= ================================ =====================================
framework               import                           install
======================= ================================ =====================================
Hugging Face Accelerate ``.accelerate.prepare_float8``   ``pip install 'float8[accelerate]'``
Transformers Trainer    ``.transformers.Float8Callback`` ``pip install 'float8[transformers]'``
Lightning, Fabric       ``.lightning.Float8Precision``   ``pip install 'float8[lightning]'``
torchtitan              ``.torchtitan.Float8Converter``  ``pip install 'float8[torchtitan]'``
======================= ================================ =====================================

Each of these files imports its framework and says where that calls what they share: the `Adapter`
of ``conversion.py``, and `float8.after_step`. ``torchao.py`` and ``transformer_engine.py``
translate other libraries' configs, and ``experts.py`` finds their experts; they import none of
them.
``float8/__init__.py`` imports these three.
"""
