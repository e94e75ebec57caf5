"""The package `float8`; everything that describes it is here (tool settings: pyproject.toml)."""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = runpy.run_path(str(ROOT / "float8" / "version.py"))["__version__"]
URL = "https://github.com/float8-developers/float8"
DEMO = ["tqdm", "matplotlib"]
ACCELERATE = "accelerate>=1.15,<1.16"
READER = "compressed-tensors; python_version >= '3.11'"  # by which Transformers reads checkpoints
# One per file of float8/integrations/, with the versions of which it does not warn.
INTEGRATIONS = {
    "accelerate": [ACCELERATE],
    "transformers": ["transformers>=5.23,<5.25; python_version >= '3.11'", ACCELERATE, READER],
    "lightning": ["lightning>=2.6,<2.7"],
    "torchtitan": ["torchtitan>=0.3,<0.4; python_version >= '3.11'"],
    "torchao": ["torchao"],  # Float8LinearConfig.from_torchao
}
CHECKPOINTS = ["safetensors"]  # float8.checkpoints
RUFF = "ruff==0.17.5"
DOCS = ["mkdocs-material", "mkdocstrings[python]", RUFF]  # ruff breaks long signatures
FRAMEWORKS = sorted({package for packages in INTEGRATIONS.values() for package in packages})
TEST = ["pytest>=8", "pytest-cov", "pytest-xdist", "hypothesis", "build", *DEMO, *DOCS]
TEST += FRAMEWORKS
# Readers of what float8.checkpoints and torch.onnx write.
TEST += [*CHECKPOINTS, "peft"]
TEST += ["trl; python_version >= '3.11'"]  # docs/frameworks/trl.md
TEST += ["onnx", "onnxruntime", "onnxscript"]
DEV = [RUFF, "mypy==2.4.1", *TEST]


def long_description() -> str:
    """README.md for an index page: links and images point into the repository, at this version."""
    at_tag = f"v{VERSION}"
    raw = URL.replace("github.com", "raw.githubusercontent.com")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    # Every second part is code, a block or a span, in which "](" is no link.
    parts = re.split(r"(^```.*?^```$|`[^`\n]*`)", text, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 2):
        part = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{raw}/{at_tag}/", parts[i])
        part = re.sub(r"\]\((?=#)", "](README.md", part)
        parts[i] = re.sub(r"\]\((?!\w+:)", f"]({URL}/blob/{at_tag}/", part)
    return "".join(parts)


setup(
    name="float8",
    version=VERSION,
    description="Train PyTorch models with 8-bit floating point matrix products",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="the float8 developers",
    project_urls={
        "Homepage": URL,
        "Documentation": f"{URL}/tree/v{VERSION}/docs",
        "Source": URL,
        "Issues": f"{URL}/issues",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
    },
    license_expression="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords=["float8", "fp8", "PyTorch", "deep learning", "mixed precision", "unit scaling"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["float8", "float8.*"]),
    package_data={"float8": ["py.typed"], "float8.numerics": ["page.*"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "triton; platform_system == 'Linux'", "tabulate", "jinja2"],
    extras_require={
        "checkpoints": CHECKPOINTS,
        "demo": DEMO,
        "docs": DOCS,
        "test": TEST,
        "dev": DEV,
        **INTEGRATIONS,
    },
)
