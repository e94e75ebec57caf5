"""torchtitan trains a small Llama 3 in float8, on a GPU and made-up data: a registry, for --module:
torchrun -m torchtitan.train --module scripts.example_torchtitan --config llama3_float8
"""

# mypy: disallow-untyped-defs=False
from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from float8.integrations.torchtitan import Float8Converter


class Counting(BaseDataLoader, BaseTokenizer):
    """Sequences that count up, tokens already: loader and tokenizer in one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    encode = decode = get_vocab_size = None

    def __init__(self, config, *, dp_rank=0, seq_len=1, local_batch_size=1, **_):
        self.key, self.shape = f"random {dp_rank}", (local_batch_size, seq_len + 1)
        self.random = torch.Generator().manual_seed(dp_rank)

    def __iter__(self):
        steps = torch.arange(self.shape[1]).expand(self.shape)
        while True:
            text = torch.randint(64, (self.shape[0], 1), generator=self.random) + steps
            yield {"input": text[:, :-1], "positions": steps[:, :-1]}, text[:, 1:].contiguous()

    def state_dict(self):
        return {self.key: self.random.get_state()}

    def load_state_dict(self, state):
        self.random.set_state(state[self.key])


def llama3(converters=None):
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=converters)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for _, _, attention, name in config.model_spec.model.traverse(FlexAttention.Config):
        setattr(attention, name, ScaledDotProductAttention.Config())
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.dataloader = config.tokenizer = Counting.Config()
    config.training.seq_len, config.training.local_batch_size = 64, 4
    return config


def llama3_float8():
    return llama3([Float8Converter.Config(recipe="tensorwise", filter_fqns=["lm_head"])])
