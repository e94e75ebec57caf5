"""Do the log-probabilities of a rollout engine agree with those of the trainer?

A small Llama learns by REINFORCE to write the tokens that a reward wants. Each step pushes its
weights into an engine, a copy of the plain model, samples with Transformers' ``generate`` there,
and trains on the samples in float8 (`weight_updates` says which tensors are pushed). Trainer and
engine then give the probability of the same tokens. They differ by what is rounded in one and not
in the other:

    weights                            what the engine got
    the trainer's float8               `float8.checkpoints.weight_updates(model)`: data and scales
    bfloat16                           parameters rounded to bfloat16
    float8, cast again, 128x128        the same blocks, scales that are no powers of two
    float8, cast again, per tensor     one scale per weight

Each with inputs of linear layers in high precision, and cast 1x128 as engines with such weights do
and as the trainer does. The engine multiplies what it got in float32. Differences are per sampled
token, the mean over all of them; KL is of the engine's distribution from the trainer's.
The multiplicative probability error is ``mean(exp(|log p of trainer - log p of engine|))`` over
sampled tokens (NeMo RL 0.6, "Add New Models"; there ``token_mult_prob_error``).

    python benchmarks/bench_rollout.py                # a quarter of a minute
    python benchmarks/bench_rollout.py --steps 50 -o rollout.json
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

import float8
from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row
from float8 import E4M3, Blockwise, Float8LinearConfig, Float8Tensor, ScaleFormat, Tensorwise
from float8.checkpoints import weight_updates

Updates = Iterable[tuple[str, Tensor]]

OWN = "the trainer's float8"
BLOCK = (128, 128)
VOCABULARY, PROMPT = 64, 4
COLUMNS = {
    "weights": ("weights", ""),
    "inputs": ("inputs", ""),
    "logp_difference": ("mean difference of log p", ".2e"),
    "largest": ("largest", ".2e"),
    "kl": ("KL", ".2e"),
    "token_mult_prob_error": ("multiplicative probability error", ".4f"),
}


class Engine:
    """A plain copy of the model that samples, and takes weights as (name, tensor).

    Args:
        model: the plain model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = copy.deepcopy(model).eval().requires_grad_(False)
        self.parameters = dict(self.model.named_parameters())

    def load(self, updates: Updates) -> None:
        """Write each tensor into its parameter; float8 data waits for its scale, which is next."""
        data = None
        for name, x in updates:
            if name.endswith(".weight_scale_inv"):
                assert data is not None, f"{name}: no weight before its scale"
                weight = Float8Tensor(data, x, BLOCK, torch.float32)
                self.parameters[name.removesuffix("_scale_inv")].copy_(weight.dequantize())
                data = None
            elif x.dtype == torch.float8_e4m3fn:
                data = x
            else:
                self.parameters[name].copy_(x)

    @torch.no_grad()
    def sample(self, prompts: Tensor, tokens: int) -> Tensor:
        """The prompts with as many sampled tokens."""
        sampled: Tensor = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        return sampled

    @contextmanager
    def casting_inputs(self) -> Iterator[None]:
        """Round the inputs of the layers that are pushed in float8, as 1x128 casts do."""

        def cast(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            scale_format = ScaleFormat.POWER_OF_TWO
            return Float8Tensor.from_high_precision(
                inputs[0], E4M3, Blockwise(1, 128), scale_format=scale_format
            ).dequantize()

        handles = [
            module.register_forward_pre_hook(cast)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and name != "lm_head"
        ]
        yield
        for handle in handles:
            handle.remove()


def cast_again(model: nn.Module, granularity: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights as another cast than the trainer's leaves them, dequantised."""
    layers = {name for name, m in model.named_modules() if isinstance(m, float8.Float8Linear)}
    for name, p in model.named_parameters():
        x = p.detach()
        if name.removesuffix(".weight") in layers:
            x = Float8Tensor.from_high_precision(x, E4M3, granularity).dequantize()
        yield name, x


def pushes(model: nn.Module) -> dict[str, Updates]:
    """What each engine gets."""
    return {
        OWN: weight_updates(model),
        "bfloat16": ((name, p.detach().bfloat16()) for name, p in model.named_parameters()),
        "float8, cast again, 128x128": cast_again(model, Blockwise(*BLOCK)),
        "float8, cast again, per tensor": cast_again(model, Tensorwise()),
    }


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """(batch, sampled tokens, vocabulary): the distribution of each sampled token."""
    logits: Tensor = model(tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.float().log_softmax(-1)


def reward_of(tokens: Tensor) -> Tensor:
    """Per sample the fraction of tokens in the lower half of the vocabulary."""
    return (tokens[:, PROMPT:] < VOCABULARY // 2).float().mean(1)


def differences(trainer: Tensor, engine: Tensor, tokens: Tensor) -> Row:
    """Between two distributions of the same tokens."""
    sampled = tokens[:, PROMPT:, None]
    by_token = (trainer - engine).gather(-1, sampled).abs()
    kl = (engine.exp() * (engine - trainer)).sum(-1)
    return {
        "logp_difference": by_token.mean().item(),
        "largest": by_token.max().item(),
        "kl": kl.mean().item(),
        "token_mult_prob_error": by_token.exp().mean().item(),
    }


def plain_model() -> Any:
    """A Llama of two layers whose sizes are multiples of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.06,  # 1 / sqrt(256): activations of order 1
        max_position_embeddings=128,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def train(options: argparse.Namespace) -> tuple[list[Row], list[float]]:
    """The differences of each step and way, and the mean reward of each step."""
    torch.manual_seed(options.seed)
    plain = plain_model()
    engine = Engine(plain)
    model = float8.convert_to_float8_training(
        plain,
        config=Float8LinearConfig.from_recipe_name("blockwise"),
        module_filter_fn=float8.filters.skip_names("lm_head"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    found, rewards = [], []
    for step in range(options.steps):
        engine.load(weight_updates(model))
        prompts = torch.randint(VOCABULARY, (options.batch, PROMPT))
        tokens = engine.sample(prompts, options.tokens)
        reward = reward_of(tokens)
        log_p = log_probabilities(model, tokens)
        advantage = reward - reward.mean()
        rewards.append(reward.mean().item())
        found += [row | {"step": step} for row in compare(engine, model, log_p.detach(), tokens)]
        of_sample = log_p.gather(-1, tokens[:, PROMPT:, None]).sum((1, 2))
        (-(advantage * of_sample).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found, rewards


def compare(engine: Engine, model: nn.Module, log_p: Tensor, tokens: Tensor) -> list[Row]:
    """The differences of every way to push and to multiply."""
    rows: list[Row] = []
    for weights, updates in pushes(model).items():
        engine.load(updates)
        with torch.no_grad():
            of_engine = log_probabilities(engine.model, tokens)
            with engine.casting_inputs():
                of_casting = log_probabilities(engine.model, tokens)
        for inputs, other in (("high precision", of_engine), ("float8 1x128", of_casting)):
            rows.append({"weights": weights, "inputs": inputs, **differences(log_p, other, tokens)})
    return rows


def means(rows: Sequence[Row]) -> list[Row]:
    """Over steps; the largest difference is that of all steps."""
    ways = dict.fromkeys((row["weights"], row["inputs"]) for row in rows)
    body: list[Row] = []
    for weights, inputs in ways:
        own = [row for row in rows if (row["weights"], row["inputs"]) == (weights, inputs)]
        body.append(
            {
                "weights": weights,
                "inputs": inputs,
                "logp_difference": sum(row["logp_difference"] for row in own) / len(own),
                "largest": max(row["largest"] for row in own),
                "kl": sum(row["kl"] for row in own) / len(own),
                "token_mult_prob_error": sum(row["token_mult_prob_error"] for row in own)
                / len(own),
                "steps": len(own),
            }
        )
    return body


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=harness.positive, default=10, help="updates of the weights")
    parser.add_argument("--batch", type=harness.positive, default=32, help="samples per step")
    parser.add_argument("--tokens", type=harness.positive, default=16, help="sampled per sample")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON there")
    options = parser.parse_args(argv)
    options.device = "cpu"
    return options


def main(argv: Sequence[str]) -> int:
    """Train, compare, and print the table."""
    options = parse(argv)
    rows, rewards = train(options)
    body = [row | {"rewards": rewards} for row in means(rows)]
    report.show(report.write("bench_rollout", argv, options, body, COLUMNS))
    print(f"mean reward of the first step {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
