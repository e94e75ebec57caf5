"""Other libraries: training frameworks, and other libraries' configs.

======================= ================================ =====================================
framework               import                           install
======================= ================================ =====================================
Hugging Face Accelerate ``.accelerate.prepare_float8``   ``pip install 'float8[accelerate]'``
Transformers Trainer    ``.transformers.Float8Callback`` ``pip install 'float8[transformers]'``
Lightning, Fabric       ``.lightning.Float8Precision``   ``pip install 'float8[lightning]'``
torchtitan              ``.torchtitan.Float8Converter``  ``pip install 'float8[torchtitan]'``
======================= ================================ =====================================

Each of these files imports its framework, after ``conversion.py`` has checked that it is installed;
``conversion.py`` is what they share. ``torchao.py``, ``transformer_engine.py`` and
``accelerate_settings.py`` translate other libraries' configs and import none of them.
``float8/__init__.py`` imports the first two, so that `Float8LinearConfig` has its constructors.
"""
