"""`analyse_module`: the calls of a module as code, with the scales of its tensors beside it::

    def forward(self, x):  x (-> 1.0, <- 0.58)
        fc1_weight = self.fc1.weight  (-> 0.036, <- 16.1)
        linear = F.linear(x, fc1_weight, None)  (-> 0.577, <- 1.01)
        return linear

It is the code that ran, one call per line: loops are unrolled, and the calls of submodules are
inlined. Each line ends with the standard deviation of its result, ``->``, and of the gradient with
respect to the result, ``<-``.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from float8.unit_scaling.transforms import track_scales

# module that defines a function -> the usual prefix of its name
_PLACES = {
    "float8.unit_scaling.functional": "U.",
    "torch.nn.functional": "F.",
    "torch._C._nn": "F.",
    "torch": "torch.",
    "": "torch.",
}


def analyse_module(
    module: nn.Module,
    inputs: Tensor | tuple[Any, ...],
    backward: Tensor | None = None,
    recurse_modules: bool = True,
    syntax_highlight: bool = False,
) -> str:
    """The calls that a module makes, each with the scales of its result, forward and backward.

    Args:
        module: what to run; a copy is run, the module and its gradients stay as they are.
        inputs: its argument, or a tuple of them.
        backward: the gradient of its output; None where the output is a scalar.
        recurse_modules: show what submodules do; otherwise each call of one is a line.
        syntax_highlight: colour for terminals; needs pygments.

    Returns:
        the code.
    """
    tracked = track_scales(module)
    output = tracked(*inputs) if isinstance(inputs, tuple) else tracked(inputs)
    output.backward(backward)
    graph: Graph = tracked.scales_graph()  # type: ignore[operator]
    body = _lines(graph.nodes) if recurse_modules else _shallow_lines(graph)
    code = "\n".join([_signature(graph), *(f"    {line}" for line in body)])
    return _highlighted(code) if syntax_highlight else code


def _signature(graph: Graph) -> str:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    scales = ", ".join(f"{node.name} {_scales(node)}" for node in inputs if _scales(node))
    names = ", ".join(["self", *(node.name for node in inputs)])
    return f"def forward({names}):" + (f"  {scales}" if scales else "")


def _lines(nodes: Iterable[Node]) -> list[str]:
    return [_line(node) for node in nodes if node.op != "placeholder"]


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_written(node.args[0])}"
    return _annotated(f"{node.name} = {_expression(node)}", [node])


def _shallow_lines(graph: Graph) -> list[str]:
    """Calls of one submodule, as long as no other call is between them, as one line."""
    lines = []
    # A list: past its end, the iterator of a graph's nodes begins again.
    for name, run in itertools.groupby(list(graph.nodes), key=_called_module):
        nodes = list(run)
        lines += _lines(nodes) if name is None else [_call_line(name, nodes)]
    return lines


def _called_module(node: Node) -> str | None:
    """The submodule, called by the module itself, inside which a node was called."""
    path: tuple[str, ...] = node.meta.get("modules", ())
    return path[0] if path else None


def _call_line(name: str, nodes: list[Node]) -> str:
    inside = set(nodes)
    read = {n: None for node in nodes for n in node.all_input_nodes if n not in inside}
    results = [node for node in nodes if not set(node.users) <= inside and node.op != "get_attr"]
    names = ", ".join(node.name for node in results) or "_"
    return _annotated(f"{names} = {_member(name)}({', '.join(n.name for n in read)})", results)


def _annotated(code: str, nodes: list[Node]) -> str:
    scales = [_scales(node) for node in nodes if _scales(node)]
    return f"{code}  {', '.join(scales)}" if scales else code


def _scales(node: Node) -> str:
    metrics = node.meta.get("metrics")
    if metrics is None:
        return ""
    backward = "n/a" if metrics.bwd is None else f"{metrics.bwd.std:.3}"
    return f"(-> {metrics.fwd.std:.3}, <- {backward})"


def _expression(node: Node) -> str:
    args = [_written(arg) for arg in node.args]
    if node.op == "get_attr":
        return _member(str(node.target))
    if node.target is operator.getitem:
        return f"{args[0]}[{_index(node.args[1])}]"
    if node.target is getattr:
        return f"{args[0]}.{node.args[1]}"
    named = [f"{key}={_written(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join([*args[1:], *named])})"
    return f"{_function(node.target)}({', '.join([*args, *named])})"


def _member(path: str) -> str:
    """``blocks.0.weight`` as Python has it."""
    return "self" + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in path.split("."))


def _function(target: Any) -> str:
    place, name = getattr(target, "__module__", None) or "", target.__name__
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    while place and place not in _PLACES:
        place = place.rpartition(".")[0]
    return _PLACES.get(place, "") + name


def _index(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_index(part) for part in value)
    if isinstance(value, slice):
        ends = [value.start, value.stop] + ([] if value.step is None else [value.step])
        return ":".join("" if end is None else _written(end) for end in ends)
    return _written(value)


def _written(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if value is Ellipsis:
        return "..."
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_written(part) for part in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def _highlighted(code: str) -> str:
    pygments = importlib.import_module("pygments")
    formatters = importlib.import_module("pygments.formatters")
    lexers = importlib.import_module("pygments.lexers")
    return str(pygments.highlight(code, lexers.PythonLexer(), formatters.TerminalFormatter()))
