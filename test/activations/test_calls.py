"""Every way to spell an op reaches it; what writes in place is left to torch."""

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from float8.activations import saved_activations
from float8.activations.ops import OPTIONAL

W = torch.randn(128, requires_grad=True)
SPELT = {
    "_KeepingBackward": {
        "x * y": lambda x, y: x * y,
        "operator.mul": operator.mul,
        "x.mul(y)": lambda x, y: x.mul(y),
        "multiply": torch.multiply,
        "x ** 2": lambda x, y: x**2,
        "x.pow": lambda x, y: x.pow(3.0),
        "torch.pow": lambda x, y: torch.pow(x, exponent=2),
        "x.square()": lambda x, y: x.square(),
        "torch.square": lambda x, y: torch.square(x),
        "F.silu": lambda x, y: F.silu(x),
        "nn.SiLU": lambda x, y: nn.SiLU()(x),
        "nn.GELU": lambda x, y: nn.GELU("tanh")(x),
        "nn.Sigmoid": lambda x, y: nn.Sigmoid()(x),
        "x.sigmoid()": lambda x, y: x.sigmoid(),
        "expit": lambda x, y: torch.special.expit(x),
        "F.tanh": lambda x, y: F.tanh(x),
        "nn.Tanh": lambda x, y: nn.Tanh()(x),
        "nn.RMSNorm": lambda x, y: nn.RMSNorm(128)(x),
        "torch.rms_norm": lambda x, y: torch.rms_norm(x, (128,), W, 1e-6),
        "nn.LayerNorm": lambda x, y: nn.LayerNorm(128)(x),
        "torch.layer_norm": lambda x, y: torch.layer_norm(x, (128,), W, W),
        "nn.Softmax": lambda x, y: nn.Softmax(dim=-1)(x),
        "x.softmax": lambda x, y: x.softmax(0),
        "torch.softmax": lambda x, y: torch.softmax(x, dim=1, dtype=torch.float32),
        "nn.Linear": lambda x, y: nn.Linear(128, 8)(x),
    },
    "_MaskedBackward": {
        "nn.ReLU": lambda x, y: nn.ReLU()(x),
        "x.relu()": lambda x, y: x.relu(),
        "torch.relu": lambda x, y: torch.relu(x),
        "nn.Dropout": lambda x, y: nn.Dropout()(x),
        "torch.dropout": lambda x, y: torch.dropout(x, 0.5, True),
    },
    "torch's": {
        "x *= y": lambda x, y: operator.imul(x + 0, y),
        "x.mul_(y)": lambda x, y: (x + 0).mul_(y),
        "in place": lambda x, y: F.silu(x + 0, inplace=True),
        "nn.ReLU in place": lambda x, y: nn.ReLU(inplace=True)(x + 0),
        "times a number": lambda x, y: 2 * x * 3.0,
        "a root": lambda x, y: x.exp() ** 0.5,
        "a power of tensors": lambda x, y: x.exp().pow(y),
        "a tensor as power": lambda x, y: 2**x,
        "squared in place": lambda x, y: (x + 0).square_(),
        "complex": lambda x, y: x * torch.complex(x, y),
        "nothing dropped": lambda x, y: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
        "everything dropped": lambda x, y: F.dropout(x, 1.0),
        "float64": lambda x, y: F.silu(x.double()),
        "small": lambda x, y: F.silu(x[:2]),
        "attention": lambda x, y: F.scaled_dot_product_attention(*[x.view(1, 4, 16, 128)] * 3),
        "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    },
}


def nodes_of(y: Tensor) -> set[str]:
    left, names = [y.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left += [next_node for next_node, _ in node.next_functions]
    return names & {"_KeepingBackward", "_MaskedBackward"}


@pytest.mark.parametrize(
    ("node", "spelling"), [(node, name) for node, calls in SPELT.items() for name in calls]
)
def test_a_spelling(node, spelling):
    x, y = (torch.randn(64, 128, requires_grad=True) for _ in range(2))
    with saved_activations(also=OPTIONAL):
        torch.manual_seed(0)
        out = SPELT[node][spelling](x, y)
    assert nodes_of(out) == ({node} if node != "torch's" else set())
    torch.manual_seed(0)
    if not spelling.startswith(("nn.Linear", "nn.GELU")):
        assert torch.equal(out, SPELT[node][spelling](x, y))
    assert nodes_of(SPELT[node][spelling](x, y)) == set(), "the scope is over"
