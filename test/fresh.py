"""Programs in a fresh interpreter: what importing costs, loads and changes.

Starting one takes seconds, nearly all of them torch's. So a program reports many facts, as JSON,
and each test looks at one of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def facts_of(program: str) -> dict[str, Any]:
    """What the program leaves in its dictionary ``facts``."""
    code = f"facts = {{}}\n{program}\nimport json\nprint(json.dumps(facts))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def example_of(docstring: str) -> str:
    """The code of a docstring: its indented blocks after ``::``, joined."""
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", docstring)
    return "\n".join(textwrap.dedent(block) for block in blocks)
