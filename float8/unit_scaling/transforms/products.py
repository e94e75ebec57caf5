"""`OnProducts`: a transform that does something else with the products of a model.

Three transforms are of this form: `simulate` rounds operands, `in_float8` multiplies in float8, and
`analysis.operands` measures operands. Each says which kinds of `contractions.CONTRACTIONS` it
takes and has one method, which is called in place of such a function.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from float8.unit_scaling.registry import Function
from float8.unit_scaling.transforms.contractions import CONTRACTIONS
from float8.unit_scaling.transforms.transformed import Mode, Transform


class OnProducts(Transform):
    """Abstract: calls `product` in place of the contractions of the kinds ``kinds``."""

    kinds: ClassVar[frozenset[str]]

    def mode(self, model: nn.Module, args: Any, kwargs: Any) -> Mode:
        """The mode for one call."""
        state = self.state(model)
        functions = [f for f, c in CONTRACTIONS.items() if c.kind in self.kinds]
        return Mode({f: functools.partial(self.product, state, f) for f in functions})

    def state(self, model: nn.Module) -> Any:
        """The first argument of `product` in one forward of a model."""
        return model

    @abstractmethod
    def product(self, state: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
        """What a contraction returns."""


def parameter_of(model: nn.Module, weight: Tensor) -> str | None:
    """The name of a parameter, of which ``weight`` may be a view; of a tied one the last."""
    # Found at each call: FSDP2 and torch.func.functional_call replace the parameters meanwhile.
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    return names.get(id(weight if weight._base is None else weight._base), names.get(id(weight)))
