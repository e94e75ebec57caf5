"""Parameters with a role and a depth, which determine their learning rates.

u-muP gives every parameter its own learning rate (arXiv 2407.17465, table 2), which depends on its
shape, its role in the model, and the depth of its stack of residual layers. A parameter of a
unit-scaled model has two attributes for that:

    mup_type           "weight" (of hidden and input layers), "bias", "norm" or "output"
    mup_scaling_depth  the number of residual layers that it shares a stack with, or None

`Parameter` makes such a parameter, `set_parameter_data` marks an existing one. Their type is
exactly ``nn.Parameter``: optimizers and compilers have fast paths for that type only. Deep copies
and pickles keep the attributes.

But ``to_empty``, ``load_state_dict(assign=True)``, FSDP2 and sending a model to another process
*replace* its parameters. `MupModule`, the base of all unit-scaled modules, keeps a table of the
attributes by parameter name and marks every replacement::

    class Scale(uu.parameter.MupModule):
        def __init__(self, features):
            super().__init__()
            self.weight = uu.Parameter(torch.ones(features), mup_type="norm")

The attributes of a parameter take precedence over the table, which copies them. If a parameter
without attributes is assigned to a name in the table, it gets the attributes from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeGuard, TypeVar, get_args

import torch
from torch import Tensor, nn

__all__ = ["MupModule", "MupType", "Parameter", "has_parameter_data", "set_parameter_data"]

MupType = Literal["weight", "bias", "norm", "output"]
"""A parameter's role: of hidden and input layers, "weight"; of a readout, "output"."""
MUP_TYPES: tuple[str, ...] = get_args(MupType)

P = TypeVar("P", bound=Tensor)  # an nn.Parameter, which torch's modules declare as a Tensor


class ParameterData(Protocol):
    """A parameter with the two attributes."""

    mup_type: MupType
    mup_scaling_depth: int | None

    @property
    def shape(self) -> torch.Size:
        """The shape; of a sharded tensor, that of the whole."""


class MupData(NamedTuple):
    """The two attributes as one value."""

    mup_type: MupType
    mup_scaling_depth: int | None


def Parameter(
    data: Tensor, mup_type: MupType, mup_scaling_depth: int | None = None
) -> nn.Parameter:
    """A parameter with a role, as the optimizers of `float8.unit_scaling.optim` need it.

    Args:
        data: its values, of any shape. Unit scaling starts weights from a standard normal
            distribution (arXiv 2303.11257).
        mup_type: "weight", "bias", "norm" or "output"; the weight of an embedding is a "weight".
        mup_scaling_depth: the number of residual layers in its stack; `DepthSequential` and
            `DepthModuleList` set it.

    Raises:
        ValueError: an unknown ``mup_type``.
    """
    return set_parameter_data(nn.Parameter(data), mup_type, mup_scaling_depth)


def set_parameter_data(parameter: P, mup_type: MupType, mup_scaling_depth: int | None = None) -> P:
    """Mark an existing parameter with its role, in place.

    Args:
        parameter: any parameter, sharded ones (DTensors) too.
        mup_type, mup_scaling_depth: as for `Parameter`, with the same error.

    Returns:
        The same object.
    """
    if mup_type not in MUP_TYPES:
        raise ValueError(f"mup_type must be one of {MUP_TYPES}; got {mup_type!r}")
    return _mark(parameter, MupData(mup_type, mup_scaling_depth))


def has_parameter_data(parameter: Tensor) -> TypeGuard[ParameterData]:
    """Whether a parameter has both attributes, with valid values."""
    return getattr(parameter, "mup_type", None) in MUP_TYPES and hasattr(
        parameter, "mup_scaling_depth"
    )


def _data_of(parameter: Tensor | None) -> MupData | None:
    if parameter is None or not has_parameter_data(parameter):
        return None
    return MupData(parameter.mup_type, parameter.mup_scaling_depth)


def _mark(parameter: P, data: MupData) -> P:
    parameter.mup_type, parameter.mup_scaling_depth = data  # type: ignore[attr-defined]
    # nn.Parameter's deep copy drops attributes. A subclass would keep them and lose torch's fast
    # paths, so the instance gets the two methods. Other types, such as DTensor, keep attributes.
    if type(parameter) is nn.Parameter:
        parameter.__deepcopy__ = _deepcopy.__get__(parameter)  # type: ignore[method-assign]
        parameter.__reduce_ex__ = _reduce_ex.__get__(parameter)  # type: ignore[method-assign]
    return parameter


def _deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    known = id(self) in memo
    copied = nn.Parameter.__deepcopy__(self, memo)
    data = _data_of(self)
    return copied if known or data is None else _mark(copied, data)


def _reduce_ex(self: nn.Parameter, protocol: Any) -> Any:
    attributes = vars(self).items()
    state = {k: v for k, v in attributes if k not in ("__deepcopy__", "__reduce_ex__")}
    return _rebuild, (self.data, self.requires_grad, state)


def _rebuild(data: Tensor, requires_grad: bool, state: Mapping[str, Any]) -> nn.Parameter:
    parameter = torch._utils._rebuild_parameter(data, requires_grad, OrderedDict())
    vars(parameter).update(state)
    found = _data_of(parameter)
    return parameter if found is None else _mark(parameter, found)


# It only makes a parameter, so torch.load(weights_only=True) may call it.
torch.serialization.add_safe_globals([_rebuild])


class MupModule(nn.Module):
    """A module that keeps the roles of its parameters when they are replaced.

    The base class of unit-scaled modules, and of modules of your own that have a `Parameter`. Name
    it before another module class: ``class Mine(MupModule, nn.Bilinear)``.

    It handles the parameters that are its own attributes, not those of submodules. They keep their
    roles under ``deepcopy``, ``pickle`` (to another process too), ``to`` and ``to_empty``,
    ``load_state_dict`` with and without ``assign=True``, FSDP2's ``fully_shard``, and assignment of
    a plain ``nn.Parameter``. The state dict is plain.

    Attributes:
        mup_types: name -> type of the parameters that the class makes without a type.
    """

    mup_types: ClassVar[dict[str, MupType]] = {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; one without a role gets that of its predecessor."""
        roles = self._roles()
        super().register_parameter(name, param)
        if param is not None and name in roles and not has_parameter_data(param):
            _mark(param, roles[name])

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 assigns to _parameters, without register_parameter, unless a class has a setattr.
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        self._roles()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restore(self.__dict__["_mup_data"])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        roles = self._roles()
        result = super()._apply(fn, recurse)
        self._restore(roles)
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        roles = self._roles()
        super()._load_from_state_dict(*args, **kwargs)
        self._restore(roles)

    def _roles(self) -> dict[str, MupData]:
        """The table, brought up to date from the parameters."""
        made = {name: MupData(mup_type, None) for name, mup_type in self.mup_types.items()}
        roles: dict[str, MupData] = self.__dict__.setdefault("_mup_data", made)
        for name, parameter in self.__dict__.get("_parameters", {}).items():
            if (data := _data_of(parameter)) is not None:
                roles[name] = data
        return roles

    def _restore(self, roles: dict[str, MupData]) -> None:
        for name, data in roles.items():
            if (parameter := self._parameters.get(name)) is not None:
                _mark(parameter, data)
