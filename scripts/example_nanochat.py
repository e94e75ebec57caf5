"""A nanochat-style script: float32 weights, bfloat16 products, Muon and AdamW, no autocast.
Float8 is the import, the call, and a line for layers that are no plain ``nn.Linear``.
"""

# mypy: disallow-untyped-defs=False
import argparse

import torch
import torch.nn.functional as F
from torch import nn

from float8 import Float8LinearConfig, convert_to_float8_training, high_precision
from float8.convert import convert_from_float8_training, register_linear_type


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class GPT(nn.Module):
    def __init__(self, vocab=64, dim=128):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mlps = nn.ModuleList(Linear(dim, dim, bias=False) for _ in range(4))
        self.lm_head = Linear(dim, vocab, bias=False)

    def forward(self, tokens, targets):
        x = F.rms_norm(self.wte(tokens).bfloat16(), (128,))
        for mlp in self.mlps:
            x = x + F.relu(mlp(x)).square()
        return F.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=30)
steps = parser.parse_args().steps
with torch.device("meta"):
    model = GPT()
register_linear_type(Linear)
config = Float8LinearConfig.from_recipe_name("tensorwise")
large_enough = lambda module, fqn: min(module.weight.shape) >= 128  # noqa: E731
convert_to_float8_training(model, config=config, module_filter_fn=large_enough)
model.to_empty(device=(device := "cuda" if torch.cuda.is_available() else "cpu"))
for p in model.parameters():
    nn.init.normal_(p, std=0.02)
print("float8 layers:", sum("Float8" in type(m).__name__ for m in model.modules()))
forward = torch.compile(model, dynamic=False) if device == "cuda" else model
rest = [*model.wte.parameters(), *model.lm_head.parameters()]
optimizers = [torch.optim.Muon(model.mlps.parameters()), torch.optim.AdamW(rest, lr=3e-3)]
for _ in range(steps):
    text = (torch.randint(64, (8, 1)) + torch.arange(33)).to(device) % 64
    (loss := forward(text[:, :-1], text[:, 1:])).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad(), high_precision(model):  # evaluation with float8 off
    print(f"loss {loss:.3f}, without float8 {forward(text[:, :-1], text[:, 1:]):.3f}")
print("swapped back:", convert_from_float8_training(model).get_submodule("mlps.0"))
