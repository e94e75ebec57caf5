"""Handles Ctrl-C between steps, so that a training ends with a checkpoint."""

import os
import signal
import sys
from collections.abc import Callable

from scripts.training.environment import NotWritten
from scripts.training.options import give_up, processes


class CtrlC:
    """Turns the first Ctrl-C into a flag that is read between steps; the second one interrupts.

    Under torchrun the second one does not interrupt: torchrun forwards the first one, and kills
    processes that still run 30 s later.
    """

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self) -> bool:
        return self.pressed

    def __enter__(self) -> "CtrlC":
        self.previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def _press(self, *_: object) -> None:
        self.pressed = True
        if processes() == 1:
            signal.signal(signal.SIGINT, self.previous)


def at_once(main: Callable[[], int], script: str) -> int:
    """Run a program; a second Ctrl-C, or a file that cannot be written, ends it in one line."""
    try:
        return main()
    except NotWritten as error:
        give_up(script, error)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\nstopped at once: --resume goes on from the last checkpoint", file=sys.stderr)
        return 130  # what a shell reports of a program that Ctrl-C ended
