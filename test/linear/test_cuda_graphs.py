"""`torch.compile(mode="reduce-overhead")` runs each recipe's step by CUDA graphs.

Forward and backward are traced and lowered as for a GPU, without one (`benchmarks/measuring`). The
reasons are torch's own: inputs that are written to at addresses that may change, ops that must not
be captured, tensors on a CPU.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch._inductor import cudagraph_utils
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.utils import _pytree as pytree

pytest.importorskip("triton")

from benchmarks.measuring.inductor import STATIC, lowered, tracing
from float8 import Float8Linear, grouped_mm
from float8.kernels import products

FAST = [
    *(("sm_90", "tensorwise", False), ("sm_90", "blockwise", False)),
    *(("sm_90", "delayed", True), ("sm_100", "rowwise", False)),
]
SLOW = [
    *(("sm_90", name, False) for name in ("delayed", "rowwise", "rowwise_with_gw_hp", "unit")),
    *(("sm_100", name, False) for name in ("blockwise", "mxfp8", "mxfp8_2d")),
]


def reasons(graphs):
    """Why torch would not capture one of these graphs."""
    found = []
    for graph in graphs:  # before they are lowered, which moves all tensors to the GPU
        values = [node.meta.get("val") for node in graph.graph.nodes]
        devices = {v.device.type for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)}
        found += [f"tensors on {device}" for device in devices - {"meta"}]
    for graph in [] if found else graphs:
        with lowered(graph, is_backward=graph is not graphs[0]) as low:
            if (node := get_first_incompatible_cudagraph_node(graph)) is not None:
                found.append(f"incompatible op {node.target}")
            written = [i for i, name in enumerate(low.graph_inputs) if name in low.mutated_inputs]
            devices = dict(low.device_node_mapping)
            found += [
                low.disable_cudagraphs_reason,
                cudagraph_utils.check_multiple_devices_or_any_cpu_nodes(devices),
                cudagraph_utils.check_for_mutation_ignore_cuda_graph_managed_tensor(
                    graph, low.mutated_inputs, written, graph.meta[STATIC]
                ),
            ]
    return [reason for reason in found if reason]


def meta(*shape, needs_grad=True):
    return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=needs_grad)


def traced(arch, function, *tensors):
    """The graphs of a function of tensors, forward and backward."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(products, "_architecture", return_value=arch))
        graphs = stack.enter_context(tracing())
        torch.compile(function, fullgraph=True, dynamic=False)(*tensors)
    assert len(graphs) == 2
    return graphs


@pytest.mark.parametrize(
    ("arch", "name", "ready"), [*FAST, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_a_layer(arch, name, ready):
    """Delayed scales in the first steps, and once they follow from the history."""
    layer = Float8Linear(256, 128, device="meta", dtype=torch.bfloat16, config=name)
    delayed = [cast for cast in layer.casts if cast.state is not None]
    for cast in delayed:
        cast.history_ready = ready
    graphs = traced(arch, layer, meta(64, 256))
    if delayed:  # their amaxes are recorded: buffers are written to
        assert all("copy_" in str(graph.graph) for graph in graphs)
    assert reasons(graphs) == []


@pytest.mark.parametrize(
    "name",
    ["rowwise", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tensorwise", "blockwise"))],
)
def test_experts(name):
    offs = torch.empty(4, device="meta", dtype=torch.int32)

    def product(x, w):
        return grouped_mm(x, w, offs, config=name)

    assert reasons(traced("sm_90", product, meta(64, 256), meta(4, 256, 128))) == []


def test_what_torch_does_not_capture_is_found():
    """A fault of each kind."""
    layer = Float8Linear(256, 128, device="meta", dtype=torch.bfloat16, config="delayed")
    state = torch.empty((), device="meta")

    def writes(x, amax):
        with torch.no_grad():
            amax.copy_(x.amax())
        return layer(x)

    def marks(x, _):
        torch.ops.float8.mark_ready.default([state], [0])
        return layer(x)

    def has_a_number_of_the_cpu(x, _):
        return layer(x) * torch.full((), 2.0, device="cpu")

    for faulty, message in (
        (writes, "mutated inputs"),
        (marks, "mark_ready"),
        (has_a_number_of_the_cpu, "on cpu"),
    ):
        graphs = traced("sm_90", faulty, meta(64, 256), meta(needs_grad=False))
        (reason, *_) = reasons(graphs)
        assert message in reason
