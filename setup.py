"""The package `float8`; everything that describes it is here (tool settings: pyproject.toml)."""

from pathlib import Path

from setuptools import find_packages, setup

DEMO = ["tqdm", "matplotlib"]
# One per file of float8/integrations/; which versions were tested is said there.
INTEGRATIONS = {
    "accelerate": ["accelerate"],
    "transformers": ["transformers; python_version >= '3.11'", "accelerate"],
    "lightning": ["lightning"],
    "torchtitan": ["torchtitan; python_version >= '3.11'"],
    "torchao": ["torchao"],  # Float8LinearConfig.from_torchao
}
DOCS = ["mkdocs-material", "mkdocstrings[python]"]  # scripts/docs.sh
FRAMEWORKS = sorted({package for packages in INTEGRATIONS.values() for package in packages})
TEST = ["pytest>=8", "pytest-cov", "pytest-xdist", "hypothesis", "build", *DEMO, *DOCS]
TEST += FRAMEWORKS
DEV = ["ruff==0.17.5", "mypy==2.4.1", *TEST]

setup(
    name="float8",
    version="0.8.0",
    description="Train PyTorch models with 8-bit floating point matrix products",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    packages=find_packages(include=["float8", "float8.*"]),
    package_data={"float8": ["py.typed"], "float8.numerics": ["page.css", "page.html", "*.js"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "triton; platform_system == 'Linux'", "tabulate"],
    extras_require={"demo": DEMO, "docs": DOCS, "test": TEST, "dev": DEV, **INTEGRATIONS},
)
