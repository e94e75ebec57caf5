"""`track_scales`: a graph of the calls that a model made, with the scale of every tensor.

`track_scales` returns a copy of a model that records its calls. Afterwards
``model.scales_graph()`` is a `torch.fx.Graph` of the latest forward:

* a *placeholder* for each tensor among the arguments, by the argument's name;
* a *get_attr* for each parameter and buffer, by its qualified name, where it is first used; also,
  with targets ``_tensor_constant0``, ..., for tensors of unknown origin;
* a *call_function* for each function that returned a tensor, a *call_method* for each method of
  one, as the model called it: ``U.linear`` is one call, and so is ``F.linear`` under `unit_scale`;
* an *output* of the results that no call read.

Each node has, in ``meta``,

======================== ========================================================================
``metrics``              `Metrics` of the tensor and, after a backward pass, of its gradient, where
                         the tensor is of floating point
``outputs_float_tensor`` whether it is
``requires_grad``        whether the node is a parameter that is trained
``clean_name``           the node's name
``modules``              the submodules that were running, outermost first, by qualified name
======================== ========================================================================

A torch function mode sees each call and its result; a tensor hook sees the gradient with respect
to that result, summed over all its users. Statistics are kept, tensors are not: the map from
tensors to nodes is weak. Other transforms do not see the calls that compute the statistics. The
random state, results and gradients do not change in any bit. The model waits for its device at each
call.

An input that requires no gradient gets one for the statistics: the calls read an alias of it, on
the same memory, that requires a gradient, and so does the output then. The caller's tensor stays as
it is. Under ``torch.no_grad`` there are no gradients to record. Calls inside ``torch.vmap`` and
``torch.func`` are not recorded: their tensors have no values of their own.
"""

from __future__ import annotations

import inspect
import operator
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from float8.unit_scaling.registry import respelt
from float8.unit_scaling.transforms.contractions import Function
from float8.unit_scaling.transforms.decompositions import decomposition_of
from float8.unit_scaling.transforms.metrics import Metrics
from float8.unit_scaling.transforms.transformed import (
    Mode,
    Transform,
    Transformed,
    is_in_functorch,
    transformed,
)

M = TypeVar("M", bound=nn.Module)

# Methods of tensors that are spelt as functions of `operator`.
_OPERATORS = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}
# Arguments of these types are in the graph as they are; of others, their types.
_SHOWN = (
    *(int, float, bool, complex, str, type(None), type(Ellipsis), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def track_scales(module: M) -> M:
    """A copy of a model that records the scales of its tensors, and of their gradients.

    Args:
        module: any module.

    Returns:
        the copy, with one method more: ``scales_graph()``, the graph of its latest forward, empty
        before the first. It composes with the other transforms in any order, and with deepcopy and
        pickle: copies start with nothing recorded.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: it is tracked already, or is compiled.
    """
    tracked = transformed(module, TrackScales())
    tracked.scales_graph = Recorded()  # type: ignore[assignment]
    return tracked


class Recorded:
    """The latest graph, and the hooks on leaves, which wait for their gradients."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.hooks: list[Any] = []

    def __call__(self) -> Graph:
        """The graph of the latest forward."""
        return self.graph

    def begin(self) -> None:
        """Drops the graph of the forward before, and its hooks, which parameters would keep."""
        for hook in self.hooks:
            hook.remove()
        self.graph, self.hooks = Graph(), []

    def __reduce__(self) -> Any:
        return Recorded, ()


@dataclass(frozen=True)
class TrackScales(Transform):
    """The transform of `track_scales`."""

    depth: ClassVar[int] = 0

    def mode(self, model: nn.Module, forward: Function, args: Any, kwargs: Any) -> Mode:
        """The mode that records one forward; refuses one that is being compiled."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "track_scales records a model that runs in Python, and this one is being compiled: "
                "call it without torch.compile"
            )
        recorded: Recorded = model.scales_graph  # type: ignore[assignment]
        recorded.begin()
        mode = _RecordingMode(recorded, model)
        with torch._C.DisableTorchFunction():
            for name, value in inspect.signature(forward).bind(*args, **kwargs).arguments.items():
                mode.add_argument(name, value)
        return mode


class _RecordingMode(Mode):
    """Records the calls of one forward; a function of ``U`` is one call."""

    def __init__(self, recorded: Recorded, model: nn.Module) -> None:
        super().__init__({})
        self.recorded, self.graph = recorded, recorded.graph
        self.names = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self.modules = {id(m): n for n, m in model.named_modules() if n}
        self.nodes = WeakIdKeyDictionary()  # tensor -> its node
        self.hooked = WeakIdKeyDictionary()  # tensors with a gradient hook -> their metrics
        self.aliases = WeakIdKeyDictionary()  # input -> what the calls read instead
        self.constants = 0
        self.running: tuple[str, ...] = ()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if decomposition_of(respelt(func)) is not None:
            return super().__torch_function__(func, types, args, kwargs)
        if is_in_functorch():
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.running = self._running()
            shown = map_aggregate((tuple(args), dict(kwargs)), self._shown)
            if self.aliases:
                args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
        output = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            result = args[0] if func is Tensor.__setitem__ else output
            if any(isinstance(x, Tensor) for x in tree_leaves(result)):
                self._add_call(respelt(func), shown, result)
        return output

    def finish(self, result: Any) -> None:
        """Close the graph."""
        # The results of the forward are still alive; so are few other tensors that no call read.
        alive, leaves = set(self.nodes.values()), ("get_attr", "placeholder")
        unread = [n for n in self.graph.nodes if n in alive and not n.users and n.op not in leaves]
        output = self.graph.output(unread[0] if len(unread) == 1 else tuple(unread))
        output.meta.update(self._meta("output", None))

    def add_argument(self, name: str, value: Any) -> None:
        """A placeholder for each tensor of an argument."""
        leaves = [value] if isinstance(value, Tensor) else tree_leaves(value)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                label = name if leaf is value else f"{name}_{index}"
                self._add_tensor(self.graph.placeholder(label), self._make_alias(leaf))

    def _make_alias(self, x: Tensor) -> Tensor:
        if x.requires_grad or not x.is_floating_point() or not torch.is_grad_enabled():
            return x
        alias = _Alias.apply(x.detach().requires_grad_())
        self.aliases[x] = alias
        return alias

    def _alias(self, x: Tensor) -> Tensor:
        return self.aliases.get(x, x)

    def _shown(self, value: Any) -> Any:
        """An argument as it is in the graph, a tensor as its node."""
        if isinstance(value, Tensor):
            return self._node_of(self._alias(value))
        if isinstance(value, _SHOWN):
            return value
        return getattr(value, "__name__", f"<{type(value).__name__}>")

    def _node_of(self, x: Tensor) -> Node:
        node = self.nodes.get(x)
        if node is None:
            return self._add_tensor(self.graph.create_node("get_attr", self._name_of(x)), x)
        if (
            x.requires_grad and x not in self.hooked and "metrics" in node.meta
        ):  # returned by an autograd function, which torch function modes do not see
            self._hook(x, node.meta["metrics"])
        return node

    def _name_of(self, x: Tensor) -> str:
        if id(x) in self.names:
            return self.names[id(x)]
        self.constants += 1
        return f"_tensor_constant{self.constants - 1}"

    def _add_call(self, func: Any, shown: Any, result: Any) -> None:
        node = self.graph.create_node(*_target(func, *shown))
        if isinstance(result, Tensor):
            self._add_tensor(node, result)
            return
        node.meta.update(self._meta(node.name, result))
        for index, part in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if isinstance(part, Tensor):
                self._add_tensor(self.graph.call_function(operator.getitem, (node, index)), part)

    def _add_tensor(self, node: Node, x: Tensor) -> Node:
        """Records a tensor as the result of a node."""
        node.meta.update(self._meta(node.name, x))
        self.nodes[x] = node
        if x.is_floating_point():
            node.meta["metrics"] = Metrics(x)
            self._hook(x, node.meta["metrics"])
        return node

    def _meta(self, name: str, value: Any) -> dict[str, Any]:
        return {
            "clean_name": name,
            "outputs_float_tensor": isinstance(value, Tensor) and value.is_floating_point(),
            "requires_grad": isinstance(value, nn.Parameter) and value.requires_grad,
            "modules": () if name == "output" else self.running,
        }

    def _running(self) -> tuple[str, ...]:
        """The submodules that are running: those that are ``self`` in a frame of the stack."""
        found: list[str] = []
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not Transformed.forward.__code__:
            name = self.modules.get(id(frame.f_locals.get("self")))
            if name is not None and name not in found:
                found.append(name)
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(reversed(found))

    def _hook(self, x: Tensor, metrics: Metrics) -> None:
        if not x.requires_grad:
            return
        self.hooked[x] = metrics
        handle = x.register_hook(metrics.set_bwd)
        if x.is_leaf:
            self.recorded.hooks.append(handle)


class _Alias(torch.autograd.Function):
    """An alias of an input on the same memory; its gradient goes no further."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # not a view: views cannot be written to here

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


def _target(func: Any, args: Any, kwargs: Any) -> tuple[str, Any, Any, Any]:
    """Operation, target, args and kwargs of a node that calls ``func``."""
    name = func.__name__
    if name == "__get__":  # x.T
        return "call_function", getattr, (args[0], func.__self__.__name__), {}
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args, kwargs
    owner = getattr(func, "__qualname__", name).partition(".")[0]
    if owner in ("Tensor", "TensorBase", "_TensorBase"):
        return "call_method", name, args, kwargs
    return "call_function", func, args, kwargs
