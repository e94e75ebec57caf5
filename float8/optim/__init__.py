"""L4: optimizers whose states are float8.

`AdamW`, `Adam`, `SGD` and `Lion` have the interface of torch.optim and keep their moments as
`Moment`s: E4M3 codes with a scale per group of 128, the second moment with COAT's expanded range.
A parameter then costs 2.1 bytes of AdamW's states instead of 8. Parameters may themselves be
`Float8Tensor`s, with a float16 master (MS-AMP's O3).

``tiles.py`` < ``moment.py`` < ``update.py`` < ``masters.py``, ``checks.py`` < ``state_dicts.py`` <
``core.py`` < ``report.py``, ``adamw.py``, ``sgd.py``, ``lion.py``; ``gradients.py`` holds gradients
in float8 until the step.

May import: ``float8.kernels``, ``float8.tensor``, ``float8.formats``.
"""

from float8.optim.adamw import Adam, AdamW
from float8.optim.lion import Lion
from float8.optim.moment import Moment
from float8.optim.report import StateReport, report
from float8.optim.sgd import SGD
from float8.optim.state_dicts import float32_state_dict

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "Moment",
    "StateReport",
    "float32_state_dict",
    "report",
]
