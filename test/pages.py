"""Run what the documents show: their Python, their commands, and the output that they print.

A page is one program. Its ``python`` blocks run in order, in one namespace and an empty directory.
Further kinds of blocks:

- ```` ```python title="train.py" ````: saved as that file, not run.
- ```` ```bash ````: a line ``python NAME.py ...`` or ``torchrun ... NAME.py ...`` runs if the page
  saved that file. Of other lines the files, modules and options that they name must exist.
- ```` ```text ```` directly after such a block: its output, in which ``...`` matches anything. A
  line ``python -m float8...`` of that block runs too.
- ``<!-- not run: REASON -->`` before a block: the block is not run.
- ``<!-- needs: lightning, torch>=2.13 -->``: the page runs only where these are installed.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib.util
import io
import linecache
import re
import shlex
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import forked
from fresh import ROOT
from torch.torch_version import TorchVersion

from scripts.training.options import Options

_BLOCK = re.compile(
    r"^(?P<skip><!-- not run: .+ -->\n+)?^```(?P<kind>\w+)(?P<options>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str  # python, bash, text, ...
    code: str
    line: int  # of its first line of code in the page, from 1
    title: str | None  # the file that it is saved as
    runs: bool  # False: marked as not run
    follows: bool  # nothing is between it and the block before


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    blocks, end = [], 0
    for found in _BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', found["options"])
        blocks.append(
            Block(
                kind=found["kind"],
                code=found["code"],
                line=text.count("\n", 0, found.start("code")) + 1,
                title=title and title[1],
                runs=found["skip"] is None,
                follows=bool(blocks) and not text[end : found.start()].strip(),
            )
        )
        end = found.end()
    return blocks


def lacks(text: str) -> str | None:
    """The first package that a page needs and that is not installed, or None."""
    for needs in re.findall(r"^<!-- needs: (.+) -->$", text, re.MULTILINE):
        for need in needs.split(", "):
            package, _, least = need.partition(">=")
            try:
                if TorchVersion(metadata.version(package)) < (least or "0"):
                    return str(need)
            except metadata.PackageNotFoundError:
                return str(need)
    return None


def run_page(path: Path, folder: Path) -> None:
    """Run a page in ``folder``, the current directory; an error names the page and the line."""
    namespace: dict[str, Any] = {"__name__": "page"}
    output: str | None = None  # of the block before, if it ran
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        place = f"{path.relative_to(ROOT)}:{block.line}"
        if block.kind == "text" and block.follows and output is not None:
            check_output(block.code, output, place)
        output = None
        if not block.runs:
            continue
        if block.title is not None:
            (folder / block.title).write_text(block.code, encoding="utf-8")
        elif block.kind == "python":
            output = run_python(block.code, namespace, place)
        elif block.kind == "bash":
            shown = after is not None and after.kind == "text" and after.follows
            output = run_commands(block.code, folder, place, shown)


def run_python(code: str, namespace: dict[str, Any], place: str) -> str:
    """Run a block; what it printed. Tracebacks show its lines."""
    linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, place, "exec"), namespace)
    return printed.getvalue()


def run_commands(code: str, folder: Path, place: str, shown: bool = False) -> str | None:
    """Run the commands whose files the page saved, and check the others; what they printed.

    With ``shown``, the page shows their output: ``python -m float8...`` runs too.
    """
    printed = None
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        saved = [word for word in words if word.endswith(".py") and (folder / word).is_file()]
        module = shown and words[:2] == ["python", "-m"] and words[2].startswith("float8")
        if module or (saved and words[0] in ("python", "torchrun")):
            printed = (printed or "") + _run(words, folder, place)
        else:
            check_command(words, place)
    return printed


def _run(words: list[str], folder: Path, place: str) -> str:
    run = {"python": forked.python, "torchrun": forked.torchrun}[words[0]]
    done = run(words[1:], folder)
    assert done.returncode == 0, f"{place}: {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_command(words: list[str], place: str) -> None:
    """Check that the script or module of a command exists, and that its options are known."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_0-9]+=.*", word)]
    ours = False
    for word in words:
        if re.match(r"(\./)?(scripts|benchmarks|test)/", word):
            assert (ROOT / word).exists(), f"{place}: there is no {word}"
            ours = True
    if "-m" in words and (module := words[words.index("-m") + 1]).startswith("float8"):
        assert importlib.util.find_spec(module) is not None, f"{place}: there is no {module}"
        ours = True
    if ours and words[0] in ("python", "bash"):
        for word in words:
            option = word.split("=")[0]
            known = not word.startswith("--") or option in known_options()
            assert known, f"{place}: no script or module has an option {option}"


@functools.cache
def known_options() -> frozenset[str]:
    """Every option that a script, a benchmark or a module of the library has."""
    found = {"--nproc-per-node", "--cov"}
    found.update("--" + field.name.replace("_", "-") for field in fields(Options))
    for folder in ("scripts", "benchmarks", "float8"):
        for file in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r'"(--[\w-]+)"', file.read_text(encoding="utf-8")))
    return frozenset(found)


def check_output(wanted: str, printed: str, place: str) -> None:
    """Check what a block printed against what the page shows."""
    checker = doctest.OutputChecker()
    if not checker.check_output(wanted, printed, OUTPUT_FLAGS):
        difference = checker.output_difference(doctest.Example("", wanted), printed, OUTPUT_FLAGS)
        raise AssertionError(f"{place}: the output differs\n{difference}")
