"""Train one byte-level GPT in one recipe; training can be stopped and resumed.

    python scripts/train_gpt.py --recipe tensorwise --steps 300 --out out/tensorwise.json

One step is: batch of the step's number, forward and backward, clip, AdamW, and `float8.after_step`:
after the optimizer, where the amaxes of the whole step are known and the next forward finds its
scales ready. A checkpoint is only ever taken between
two such steps, so it holds no half-finished history.

Besides its GEMMs a run may keep in float8 the states of AdamW (`--optimizer float8_adamw`), the
activations that other ops save (`--saved-activations`), or the parts of an MS-AMP level (`--ms-amp
O2`); see training/savings.py. `--inspect run.json` reports the casts' statistics at every
`--eval-interval`-th step, and changes no loss.

The options in `Options.identity` and the text determine the numbers. Ctrl-C finishes the running
step and writes a checkpoint; `--resume` refuses one whose identity differs and otherwise continues
to the same losses, on a CPU bit for bit.

`--nproc 2`, or torchrun, shares the model and each batch among processes (training/parallel.py),
which stop, save and resume as one; their checkpoint holds whole tensors, written by the first of
them, and is for as many processes.
"""

import contextlib
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.memory import bytes_of, state_tensors
from benchmarks.models import text as texts
from float8 import after_step, inspect_every, saved_activations
from float8.ms_amp import ms_amp
from scripts.training import gpt, savings
from scripts.training.ctrl_c import CtrlC, at_once
from scripts.training.environment import NotWritten, check_writable, environment, write_json
from scripts.training.half_products import HalfProducts
from scripts.training.options import EPILOG, Options, give_up, options_from, parser, processes
from scripts.training.parallel import launch, leave, team_of

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0  # Llama's (arXiv:2302.13971)
UNIT_DECAY = 2**-13  # per step, whatever the learning rate (u-muP, arXiv:2407.17465)
FINAL_LEARNING_RATE = 0.1  # of the peak: cosine, as Llama


@dataclass
class History:
    train_loss: list[float] = field(default_factory=list)  # one per step
    val_loss: list[tuple[int, float]] = field(default_factory=list)  # (steps taken, loss)
    seconds: list[float] = field(default_factory=list)  # per step, validation not included


class Trainer:
    def __init__(self, options: Options, text: texts.Text) -> None:
        if (size := min(len(text.train), len(text.held_out))) <= options.context:
            needed = f"one window of --context {options.context} needs {options.context + 1}"
            raise ValueError(f"of the text's files, some have {size} bytes, but {needed}")
        self.options, self.text, self.history = options, text, History()
        self.team, o = team_of(options.nproc, options.device), options
        sizes = gpt.Sizes(o.layers, o.width, o.heads, o.context)
        torch.manual_seed(options.seed)  # every recipe starts from the same weights
        model = gpt.GPT(sizes).to(options.device)
        self.model = self.team.model(model, options.recipe)
        self.is_float8 = any(hasattr(module, "cast_input") for module in self.model.modules())
        self.unit_scaled = options.recipe in gpt.UNIT
        self.optimizer = self._adamw()
        if options.ms_amp:
            # The head keeps its dtypes, as in recipes.
            self.model, self.optimizer = ms_amp(
                self.model, self.optimizer, options.ms_amp, module_filter_fn=gpt.is_body
            )
        if options.saved_activations:
            saved_activations(self.model).__enter__()  # for the model's life
        self.forward = torch.compile(self.model) if options.compile else self.model
        self.products = HalfProducts if multiplies_slowly(options) else contextlib.nullcontext
        if options.resume:
            self._load()
        self.watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if options.inspect:
            every, path = options.eval_interval, options.inspect
            self.watch = inspect_every(self.model, every, path=path, step=self.step)

    @property
    def step(self) -> int:
        return len(self.history.train_loss)

    def fit(
        self,
        stop: Callable[[], bool] = lambda: False,
        until: int | None = None,
        shared: "tqdm[Any] | None" = None,
    ) -> bool:
        """Train to the last step, or to step `until`; False, and a checkpoint, if `stop()`.

        Args:
            stop: asked before each step.
            until: the step to end before.
            shared: the `progress` of several trainers; None for one of this training.
        """
        o, until = self.options, self.options.steps if until is None else until
        own = progress([self]) if shared is None else contextlib.nullcontext(shared)
        with own as bar:
            bar.set_description_str(f"{o.run:>12}", refresh=False)
            while self.step < until:
                if self.team.any(stop()):
                    self.save()
                    return False
                start = time.perf_counter()
                with self.watch:
                    loss = self._train_step()  # .item() in it waits for the device
                self.history.seconds.append(time.perf_counter() - start)
                self.history.train_loss.append(loss)
                if self.step % o.eval_interval == 0 or self.step == o.steps:
                    self.history.val_loss.append((self.step, self.validate()))
                    self.save()
                on_gpu = torch.device(o.device).type != "cpu"  # a CPU emulates float8 products
                speed = f", {self.tokens_per_second():,.0f} tokens/s" if on_gpu else ""
                bar.set_postfix_str(f"loss {loss:.3f}{speed}", refresh=False)
                bar.update()
        return True

    def validate(self) -> float:
        """The mean loss of the held-out text, in the recipe's own arithmetic."""
        o = self.options
        batches = self.text.held_out_batches(o.eval_batches, batch=o.batch, context=o.context)
        self.model.eval()
        with torch.no_grad(), self.products():
            losses = [self._loss(*self.team.part(batch)).item() for batch in batches]
        self.model.train()
        return self.team.mean(statistics.fmean(losses))[0]

    def tokens_per_second(self) -> float:
        """From the median step: the first ones warm up, and other programs may run too."""
        return self.options.batch * self.options.context / statistics.median(self.history.seconds)

    def seconds_per_step(self) -> float:
        """From a few steps, of a trainer that is not used after; with its share of validations."""
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            self._train_step()
            seconds.append(time.perf_counter() - start)
        validation = self.options.eval_batches / 3  # in steps: a forward is a third of one
        share = validation / self.options.eval_interval
        return self.team.mean(statistics.median(seconds[1:]) * (1 + share))[0]

    def summary(self) -> dict[str, Any]:
        return {
            "recipe": self.options.run,
            "seed": self.options.seed,
            "processes": self.team.size,
            "final_val_loss": self.history.val_loss[-1][1],
            "tokens_per_second": self.tokens_per_second(),
            "saved_for_backward_mib": self.saved_for_backward() / 2**20,
            **self.held(),
            "text": self.text.digest,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "train_loss": self.history.train_loss,
            "val_loss": self.history.val_loss,
        }

    def saved_for_backward(self) -> int:
        """Bytes that one forward pass keeps for backward: unique storages without parameters.

        Counted eagerly, and with the model as training left it: the checkpoint is written before,
        because a forward pass also records amaxes for delayed scaling. Of several
        processes it is what each keeps of its part of the batch; weights that were gathered for the
        forward pass are empty by its end.
        """
        own = self.team.addresses(self.model)
        kept: dict[int, UntypedStorage] = {}

        def pack(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage
            return saved.detach()  # an op that saves its own output would never free it

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            loss = self._loss(*self._batch(), forward=self.model)
        # The graph holds every storage that is not empty, so their addresses differ.
        total = sum(storage.nbytes() for address, storage in kept.items() if address not in own)
        del loss
        return total

    def held(self) -> dict[str, float]:
        """MiB of this process between two steps, gradients not freed; and its largest size ever."""
        with self.products():
            self._loss(*self._batch(), forward=self.model).backward()
        parameters = list(self.model.parameters())
        sizes = {
            "parameters_mib": bytes_of(parameters),
            "gradients_mib": bytes_of(p.grad for p in parameters if p.grad is not None),
            "optimizer_mib": bytes_of(state_tensors(self.optimizer)),
            # Kilobytes, but on macOS.
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 2**10),
        }
        self.optimizer.zero_grad()
        return {name: size / 2**20 for name, size in sizes.items()}

    def save(self) -> None:
        """Atomically: a reader, or a crash half-way, finds the old checkpoint or the new one."""
        path = self.options.checkpoint
        state = {
            "identity": self.options.identity(),
            "text": self.text.digest,
            **self.team.state(self.model, self.optimizer),
            "history": asdict(self.history),
        }
        if self.team.rank > 0:
            return
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, partial)
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:  # the latter is C++'s, of a full disk
            partial.unlink(missing_ok=True)
            raise NotWritten(f"the checkpoint was not written to {path}: {error}") from error

    def _load(self) -> None:
        path = self.options.checkpoint
        try:
            state = torch.load(path, map_location=self.options.device, weights_only=True)
            text, identity = state["text"], state["identity"]
            self.history = History(**state["history"])
        except FileNotFoundError as error:
            raise ValueError(f"no checkpoint at {path}: leave out --resume") from error
        except Exception as error:  # a damaged file may contain any pickle instruction
            raise ValueError(f"{path} is not a whole checkpoint: leave out --resume") from error
        if text != self.text.digest:
            raise ValueError(f"{path} was trained on another text: resume with its --data")
        for name, ours in self.options.identity().items():
            if (theirs := identity.get(name)) != ours:
                given = f"--{name.replace('_', '-')} {theirs}"
                fix = "resume with that, or leave out --resume"
                raise ValueError(f"{path} was trained with {given}, not {ours}: {fix}")
        self.team.load(self.model, self.optimizer, state)

    def _adamw(self) -> torch.optim.Optimizer:
        """Weight decay is for matrices; gains of norms have no reason to be small."""
        o, parameters = self.options, list(self.model.parameters())
        decay = UNIT_DECAY if self.unit_scaled else WEIGHT_DECAY
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        rate = o.unit_learning_rate if self.unit_scaled else o.learning_rate
        optimizer = savings.adamw("unit" if self.unit_scaled else o.optimizer, groups, rate, BETAS)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def _train_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * schedule(self.step, self.options.steps)
        with self.products():
            loss = self._loss(*self._batch())
            loss.backward()
        if not self.unit_scaled:  # u-muP trains without; its gradients are far longer than 1
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.is_float8:
            after_step(self.model)
        return self.team.mean(loss.item())[0]

    def _batch(self) -> tuple[Tensor, Tensor]:
        o = self.options
        whole = self.text.batch(self.step, seed=o.seed, batch=o.batch, context=o.context)
        return self.team.part(whole)

    def _loss(self, tokens: Tensor, targets: Tensor, forward: nn.Module | None = None) -> Tensor:
        device = torch.device(self.options.device)
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = (forward or self.forward)(tokens.to(device), targets.to(device))
        return loss


def progress(trainers: Sequence[Trainer]) -> "tqdm[Any]":
    """The bar of all steps of several trainings, from those that they have taken."""
    return tqdm(
        total=sum(trainer.options.steps for trainer in trainers),
        initial=sum(trainer.step for trainer in trainers),
        unit="step",
        mininterval=0.5 if sys.stderr.isatty() else 10.0,  # seconds
        smoothing=0,  # recipes differ in speed: the mean of all of them tells when it ends
        disable=trainers[0].team.rank > 0,
    )


def multiplies_slowly(options: Options) -> bool:
    """Whether bf16 products gain from the detour of `HalfProducts`; tiny ones would lose."""
    if torch.device(options.device).type != "cpu" or options.compile:
        return False
    # `get_capabilities` is not in every torch this runs on; without it, expect little.
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    large = options.batch * options.context * options.width >= 2**16
    return large and not known.get("amx_bf16")


def schedule(step: int, steps: int) -> float:
    """Of the peak: linear warm-up over the first tenth, then half a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    progress = max(0, step - warmup) / max(1, steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    decay = FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine
    return min(1.0, (step + 1) / warmup) * decay


def main(argv: list[str] | None = None) -> int:
    p = parser((__doc__ or "").partition("\n")[0])
    p.epilog = EPILOG
    p.add_argument("--recipe", help=f"{', '.join(gpt.OWN)}, or one of float8's (bf16)")
    p.add_argument("--optimizer", choices=savings.OPTIMIZERS, help="how AdamW keeps its moments")
    p.add_argument("--saved-activations", action="store_true", help="for backward, in float8")
    p.add_argument("--ms-amp", choices=savings.LEVELS, help="an MS-AMP level (float8.ms_amp)")
    p.add_argument("--checkpoint", type=Path, help="default: out/gpt_RUN.pt")
    p.add_argument("--inspect", type=Path, help="a file for python -m float8.numerics.report")
    p.add_argument("--out", type=Path, help="write the losses and speeds here, as JSON")
    args = p.parse_args(argv)
    try:
        options = options_from(args)
        if args.checkpoint is None:
            options = replace(options, checkpoint=Path(f"out/gpt_{options.run}.pt"))
        check_writable(options.checkpoint, "--checkpoint")
        if args.out:
            check_writable(args.out, "--out")
        if options.nproc > processes():
            return launch(__file__, sys.argv[1:] if argv is None else argv, options.nproc)
        trainer = Trainer(options, texts.load(options.data, standard_library=True))
    except (ValueError, OSError) as error:
        give_up("train_gpt.py", error)
    with CtrlC() as stop:
        finished = trainer.fit(stop)
    if finished:
        _report(trainer, args.out)
    elif trainer.team.rank == 0:
        print(f"stopped after step {trainer.step}: continue with the same command and --resume")
    trainer.team.close()
    return 0 if finished else 130  # what a shell reports of a program that Ctrl-C ended


def _report(trainer: Trainer, out: Path | None) -> None:
    options, summary = trainer.options, trainer.summary()
    if trainer.team.rank > 0:
        return
    print("{recipe}: validation loss {final_val_loss:.4f}".format(**summary))
    if out:
        about = {**environment(options.seed, options.device), "options": options.record()}
        write_json(out, {**about, "runs": [summary]})


if __name__ == "__main__":
    leave(at_once(main, "train_gpt.py"))
