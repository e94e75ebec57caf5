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

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from float8.unit_scaling.transforms import track_scales


def analyse_module(
    module: nn.Module,
    inputs: Tensor | tuple[Any, ...],
    backward: Tensor | None = None,
    syntax_highlight: bool = False,
) -> str:
    """The calls that a module makes, each with the scales of its result, forward and backward.

    Args:
        module: what to run; a copy is run, the module and its gradients stay as they are.
        inputs: its argument, or a tuple of them.
        backward: the gradient of its output; None where the output is a scalar.
        syntax_highlight: colour for terminals; needs pygments.

    Returns:
        the code.
    """
    tracked = track_scales(module)
    output = tracked(*inputs) if isinstance(inputs, tuple) else tracked(inputs)
    output.backward(backward)
    graph = tracked.scales_graph()  # type: ignore[operator]
    given = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    names = ", ".join(["self", *(node.name for node in given)])
    written = graph.python_code("self").src.rstrip().split("\n")[-len(nodes) :]
    lines = [_annotated(f"def forward({names}):", given, names=True)]
    for node, line in zip(nodes, written, strict=True):
        lines.append(_annotated(f"    {_readable(line)}", [node]))
    code = "\n".join(lines)
    if not syntax_highlight:
        return code
    from pygments import formatters, highlight, lexers  # type: ignore[import-untyped]

    return str(highlight(code, lexers.PythonLexer(), formatters.TerminalFormatter()))


def _readable(line: str) -> str:
    """A line that torch.fx wrote, without the variables that it frees, and with short names."""
    name, equals, call = line.strip().partition(" = ")
    call = re.sub(r";  [\w =]+ = None$", "", call).replace(" = ", "=")
    call = re.sub(r"\btorch\.(_C\._nn|nn\.functional)\.", "F.", call)
    call = re.sub(r"\bfloat8_unit_scaling_functional_[a-z]+_", "U.", call)
    call = re.sub(r'getattr\(([^(),]+), "(\d+)"\)', r"\1[\2]", call)
    return name + equals + call


def _annotated(code: str, nodes: Iterable[Node], names: bool = False) -> str:
    """A line of code with the standard deviations of tensors and of their gradients."""
    scales = []
    for node in nodes:
        if (metrics := node.meta.get("metrics")) is not None:
            backward = "n/a" if metrics.bwd is None else f"{metrics.bwd.std:.3}"
            name = f"{node.name} " if names else ""
            scales.append(f"{name}(-> {metrics.fwd.std:.3}, <- {backward})")
    return f"{code}  {', '.join(scales)}" if scales else code
