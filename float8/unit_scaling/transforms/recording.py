"""What a model would compute: its forward run once without arithmetic, call by call.

Some decisions about a call depend on what comes later: whether a tensor is the skip connection of
a residual layer is known when the addition comes, long after the branch has read it. So the
forward is run beforehand, on fake tensors: shapes and types without values, of a copy of the model
whose parameters are fake too. Nothing of the model changes, nothing random is drawn, and a layer of
any size takes as long.

The result is a list of calls (`Call`). Tensors become values (`Value`), numbered as they appear:
what an in-place call leaves in a tensor is another value. Of each value is known

    origins     the values it was computed from, all the way up, by floating-point tensors;
    alias       the value that it is another view, shape or precision of, itself if none;
    learned     whether it was computed from parameters alone;
    trained     whether it is a parameter that is trained.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext

Path = tuple[Any, ...]

# Functions whose result is their first operand in another view, shape or precision.
ALIASES = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous"),
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "__get__"),
        *("squeeze", "unsqueeze", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
        *("clone", "alias"),
    }
)


@dataclass
class Value:
    """What a tensor holds at one time."""

    number: int
    alias: int
    origins: frozenset[int] = frozenset()
    learned: bool = False
    trained: bool = False
    parameter: str | None = None
    call: int | None = None
    shape: tuple[int, ...] = ()


@dataclass
class Call:
    """One call of a function on tensors.

    ``inputs`` are its floating-point operands, each with its path in ``(args, kwargs)``.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    inputs: list[tuple[Path, Value]]
    line: str
    outputs: list[Value] = field(default_factory=list)

    def operand(self, position: int, name: str) -> Value | None:
        """The floating-point operand at a position or of a name."""
        for path, value in self.inputs:
            if path in ((0, position), (1, name)):
                return value
        return None


def name_of(function: Any) -> str:
    """A function's name, one for a method and its operator: ``mul`` for ``Tensor.__mul__``."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if name == "__get__" else name.rstrip("_").removeprefix("__") or name


# torch.compile calls it while tracing and takes its result for a constant.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tensors_in(arguments: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in nested lists, tuples and dicts, with the way to each."""
    if isinstance(arguments, Tensor):
        yield path, arguments
    elif isinstance(arguments, list | tuple):
        for i, item in enumerate(arguments):
            yield from tensors_in(item, (*path, i))
    elif isinstance(arguments, dict):
        for name, item in arguments.items():
            yield from tensors_in(item, (*path, name))


def at(whole: Any, path: Path) -> Any:
    """What a path leads to."""
    for step in path:
        whole = whole[step]
    return whole


def with_at(whole: Any, path: Path, new: Any) -> Any:
    """Nested lists, tuples and dicts with something else at a path."""
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(whole, dict):
        return {k: with_at(v, rest, new) if k == first else v for k, v in whole.items()}
    items = [with_at(v, rest, new) if i == first else v for i, v in enumerate(whole)]
    return items if isinstance(whole, list) else tuple(items)


class Recorder:
    """Numbers values and calls while a model runs."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self._now: dict[int, Value] = {}  # id of a tensor -> what it holds now
        self._alive: list[Tensor] = []  # whose ids must not be given to others

    def value(self, tensor: Tensor, parameter: str | None = None) -> Value:
        """What a tensor holds; a tensor that no call produced comes from outside."""
        if id(tensor) not in self._now:
            new = self._new(tensor)
            new.parameter, new.learned = parameter, parameter is not None
            new.trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        return self._now[id(tensor)]

    def _new(self, tensor: Tensor) -> Value:
        number = len(self.values)
        new = Value(number, alias=number, shape=tuple(tensor.shape))
        self.values.append(new)
        self._now[id(tensor)] = new
        self._alive.append(tensor)
        return new

    def record(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function and remember the call."""
        where = args, kwargs
        inputs = [(p, self.value(t)) for p, t in tensors_in(where) if t.is_floating_point()]
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        call = Call(name_of(function), function, where, inputs, line_of_caller())
        outputs = [t for _, t in tensors_in(result) if t.is_floating_point()]
        if result is None and args and isinstance(args[0], Tensor):  # x[i] = y changes x
            outputs = [args[0]]
        for tensor in outputs:
            if any(tensor is arg for _, arg in tensors_in(where)) and not is_in_place(function):
                continue  # handed through, x.contiguous() for example
            call.outputs.append(self._result(tensor, call))
        self.calls.append(call)
        return result

    def _result(self, tensor: Tensor, call: Call) -> Value:
        sources = [value for _, value in call.inputs]
        new = self._new(tensor)
        new.call = len(self.calls)
        new.origins = frozenset().union(*({v.number} | v.origins for v in sources))
        new.learned = bool(sources) and all(v.learned for v in sources)
        if call.name in ALIASES and sources and not is_in_place(call.function):
            new.alias = sources[0].alias
        return new


def is_in_place(function: Any) -> bool:
    """Whether a function leaves its result in its first operand."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def line_of_caller() -> str:
    """Where the model calls, as ``file:line``: the innermost line outside torch and this room."""
    return next(_lines(traceback.walk_stack(None)), "an unknown line")


def line_of_error(error: BaseException) -> str:
    """Where the model made an error, in the same form."""
    return [*_lines(traceback.walk_tb(error.__traceback__)), "an unknown line"][-2:][0]


def _lines(frames: Iterator[tuple[Any, int]]) -> Iterator[str]:
    torch_room, own_room = str(torch.__path__[0]), __file__.rpartition("/transforms/")[0]
    for frame, line in frames:
        name = frame.f_code.co_filename
        if not name.startswith((torch_room, own_room, "<")):
            yield f"{name}:{line}"


def on_fake_tensors(
    model: nn.Module, flat: list[Any], run: Callable[[nn.Module, list[Any]], None]
) -> None:
    """Run a model's fake copy: ``run(copy, flat)``, with the tensors among ``flat`` made fake."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with unset_fake_temporarily(), _unwatched():
        # The environment is for sizes that depend on values: x[x > 0] has an unknown one.
        fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with fakes, FakeCopyMode(fakes):
            twin = copy.deepcopy(model)
        inputs = [
            fakes.from_tensor(x.detach(), static_shapes=True) if isinstance(x, Tensor) else x
            for x in flat
        ]
        with fakes, torch.no_grad():
            run(twin, inputs)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Without the modes of transformed models around this one, which would see what is no call."""
    modes = []
    while torch._C._len_torch_function_stack():
        mode = _pop_mode()
        if isinstance(mode, DeviceContext):  # torch.set_default_device's, always the last one
            _push_mode(mode)
            break
        modes.append(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
