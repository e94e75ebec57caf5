"""Which versions of a framework its integration was tested with, and what to say of others.

Each integration calls `require` before it imports its framework: a missing package is an error that
names the line to install it with, a version outside the tested range a warning that names the
range. Frameworks change what they call between minor versions, so a range ends at the next minor
version after the newest one that the tests ran against.
"""

from __future__ import annotations

import warnings
from importlib import metadata

from torch.torch_version import TorchVersion


def require(package: str, extra: str, tested: tuple[str, str]) -> None:
    """Raise if ``package`` is not installed; warn if its version is not one of those tested.

    Args:
        package: its name on PyPI.
        extra: of this project's ``setup.py``, which installs it.
        tested: the first version that was tested, and the first one beyond them.

    Raises:
        ImportError: it is not installed.
    """
    first, beyond = tested
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"float8.integrations.{extra} needs {package}: pip install 'float8[{extra}]'"
        ) from error
    if not TorchVersion(first) <= version < TorchVersion(beyond):
        warnings.warn(
            f"float8.integrations.{extra} was tested with {package} >= {first}, < {beyond}, and "
            f"{version} is installed: it may have changed what it calls. pip install "
            f"'{package}>={first},<{beyond}' takes a tested one",
            stacklevel=3,
        )
