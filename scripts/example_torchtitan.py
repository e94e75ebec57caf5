"""torchtitan trains a small Llama 3 in float8, on made-up data: a config registry, for --module::

    PYTHONPATH=. torchrun --nproc_per_node 1 -m torchtitan.train \\
        --module scripts.example_torchtitan --config llama3_float8 --training.steps 50

or in float8 from the command line, whatever the model: ``--config llama3 --override.imports
'float8.integrations.torchtitan.float8={"recipe": "rowwise", "filter_fqns": ["lm_head"]}'``.
"""

from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from float8.integrations.torchtitan import Float8Converter


class Counting(BaseDataLoader):
    """Sequences of tokens that count up in random strides."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        tokens: int = 64

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.tokens, self.batch, self.steps = config.tokens, local_batch_size, seq_len + 1
        self.random = torch.Generator().manual_seed(dp_rank)

    def __iter__(self):
        steps = torch.arange(self.steps).expand(self.batch, -1)
        while True:
            start, stride = torch.randint(self.tokens, (2, self.batch, 1), generator=self.random)
            text = (start + stride * steps) % self.tokens
            yield {"input": text[:, :-1], "positions": steps[:, :-1]}, text[:, 1:].contiguous()

    def state_dict(self):
        return {"random": self.random.get_state()}

    def load_state_dict(self, state):
        self.random.set_state(state["random"])


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = None


def llama3(converters=None):
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=converters)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for _, _, layer, name in config.model_spec.model.traverse(FlexAttention.Config):
        setattr(layer, name, ScaledDotProductAttention.Config())
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.dataloader, config.tokenizer = Counting.Config(), NoTokenizer.Config()
    config.training.seq_len, config.training.local_batch_size = 64, 4
    return config


def llama3_float8():
    return llama3([Float8Converter.Config(recipe="tensorwise", filter_fqns=["lm_head"])])
