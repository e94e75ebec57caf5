"""Optimizers whose states are float8.

`AdamW`, `Adam`, `SGD`, `Lion` and `Muon` have the interface of torch.optim and keep their moments
as `Moment`s: E4M3 codes with a scale per group of 128, the second moment with COAT's expanded
range. A parameter then costs 2.1 bytes of AdamW's states instead of 8. Parameters may themselves be
`Float8Tensor`s, with a float16 master (MS-AMP's O3).

``moment.py``, ``options.py`` < ``state_dicts.py`` < ``optimizer.py`` < ``optimizers.py`` <
``muon.py``; ``report.py``; ``gradients.py`` keeps gradients in float8 until the step. The step of
one parameter is ``float8/kernels/optimizer_step.py``, by the rules of
``float8/kernels/update_rules.py``.

A new optimizer is its rule there and its class in ``optimizers.py``. It runs on every device; to
run fused on CUDA the rule also gets its branch in ``kernels/gpu/optimizer_step.py``.
"""

from float8.optim.muon import Muon
from float8.optim.optimizers import SGD, Adam, AdamW, Lion
from float8.optim.report import report
from float8.optim.state_dicts import float32_state_dict

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon", "float32_state_dict", "report"]
