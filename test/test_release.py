"""The wheel and the source distribution are complete, and work where nothing else of the tree is.

Both are built as ``python -m build --no-isolation`` does it, without a network, from a copy of the
repository. The README's Python runs with the wheel's float8, in a folder with nothing else.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh import ROOT
from pages import blocks_of

import float8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("build") is None, reason="the package build is not installed"),
]
NOT_REQUIRED = ["numpy", "pandas", "matplotlib", "safetensors", "transformers", "pytest"]
# Run after the README's Python: the files of the package that are no Python.
PROGRAM = """
import json
from importlib import metadata
from pathlib import Path
import torch
import float8
from float8.numerics.report import main

model = float8.convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32)))
with float8.inspect(model) as report:
    model(torch.randn(32, 32)).sum().backward()
report.save("run.json")
facts = {
    "file": float8.__file__,
    "version": [float8.__version__, metadata.version("float8")],
    "page": main(["run.json"]),
}
Path("facts.json").write_text(json.dumps(facts))
"""


@dataclass(frozen=True)
class Built:
    """What was built."""

    wheel: Path
    sdist: Path

    def of_the_wheel(self, name: str) -> str:
        """A file of its .dist-info."""
        with zipfile.ZipFile(self.wheel) as archive:
            (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
            return archive.read(path).decode()


def succeeds(*command: str | Path, cwd: Path) -> str:
    """The output of a command that must exit with 0, and sees nothing of this repository."""
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS", "COV_CORE_SOURCE", "VIRTUAL_ENV")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copy_of_the_repository(to: Path) -> Path:
    """The repository without what git ignores, and with files that must not be taken."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").split("\n")]
    ignored = [name for name in ignored if name and not name.startswith("#")]
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(".git", *ignored))
    for junk in ("test/__pycache__/a.pyc", "out/demo.json", ".venv/a.py", "build/lib/float8/a.py"):
        (to / junk).parent.mkdir(parents=True, exist_ok=True)
        (to / junk).write_text("junk", encoding="utf-8")
    return to


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("release")
    copy = copy_of_the_repository(folder / "copy")
    command = ["-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)]
    succeeds(sys.executable, *command, cwd=folder)
    (wheel,), (sdist,) = (list((folder / "dist").glob(f"*{end}")) for end in (".whl", ".tar.gz"))
    return Built(wheel, sdist)


# --- what is in them


def files_of(sdist: Path) -> set[str]:
    """The files of a source distribution that setuptools did not make."""
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {name for name in names if name.startswith("float8.egg-info/")}
    return names - made - {"PKG-INFO", "setup.cfg"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_sdist_is_the_repository(built):
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    tracked = {name for name in listed if (ROOT / name).is_file()}
    assert files_of(built.sdist) == tracked


def test_the_wheel_is_the_whole_package(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names == {name for name in files_of(built.sdist) if name.startswith("float8/")}
    assert "the float8 authors" in built.of_the_wheel("licenses/LICENSE")


# --- what an index page shows


def test_the_metadata_is_complete(built):
    about = email.message_from_string(built.of_the_wheel("METADATA"))
    assert about["License-Expression"] == "BSD-3-Clause"
    assert about["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    urls = urls_of(about)
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    for place in (urls["Documentation"], urls["Changelog"]):  # SOURCE/blob/TAG/PATH
        path = place.partition("#")[0].removeprefix(f"{urls['Source']}/").split("/", 2)[2:]
        assert ROOT.joinpath(*path).exists()
    for name in ("mkdocs.yml", "CITATION.cff"):
        named = re.findall(r"^repo[\w-]*: (\S+)$", (ROOT / name).read_text("utf-8"), re.MULTILINE)
        assert named == [urls["Source"]], name


def urls_of(about: email.message.Message) -> dict[str, str]:
    return dict(line.split(", ") for line in about.get_all("Project-URL", []))


# --- what they do


def test_the_readme_runs_with_the_wheel(built, tmp_path):
    """Its links and images point into the repository at this version."""
    about = email.message_from_string(built.of_the_wheel("METADATA"))
    text, source = about.get_payload(), urls_of(about)["Source"]
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if not re.match(r"https?://|mailto:|#", link)] == []
    tag, raw = f"v{about['Version']}/", source.replace("github.com", "raw.githubusercontent.com")
    paths = [
        link.partition("#")[0].removeprefix(at)
        for at in (f"{source}/blob/{tag}", f"{raw}/{tag}")
        for link in links
        if link.startswith(at)
    ]
    assert paths and [path for path in paths if not (ROOT / path).is_file()] == []
    blocks = [b for b in blocks_of(text) if b.kind == "python" and b.runs and b.title is None]
    snippets = [block.code for block in blocks]
    assert snippets
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path / "site")
    folder = tmp_path / "work"
    folder.mkdir()
    path = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
        f"sys.modules.update(dict.fromkeys({NOT_REQUIRED}))"  # importing these fails
    )
    (folder / "snippets.py").write_text("\n".join([path, *snippets, PROGRAM]), encoding="utf-8")
    succeeds(sys.executable, "snippets.py", cwd=folder)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    assert Path(facts["file"]).is_relative_to(tmp_path), "the float8 of the wheel"
    assert facts["version"] == [float8.__version__] * 2
    assert facts["page"] == 0 and (folder / "run.html").is_file()
