"""Tools for Triton kernels that need no GPU.

python -m scripts.kernel_tools run       executes the PTX of every form that ships
python -m scripts.kernel_tools report    compiles them, and reads their machine code
python -m scripts.kernel_tools scan      scans machine code of any kernel
"""

import argparse
import sys
from collections.abc import Sequence

from scripts.kernel_tools import report, run, scan


def main(argv: Sequence[str]) -> int:
    """Run a command; its exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m scripts.kernel_tools", description=__doc__, formatter_class=form
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in (("run", run), ("report", report), ("scan", scan)):
        own = commands.add_parser(name, description=module.__doc__, formatter_class=form)
        module.add_options(own)
        own.set_defaults(main=module.main)
    options = parser.parse_args(argv)
    status: int = options.main(options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
