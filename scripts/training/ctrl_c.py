"""Ctrl-C as a question between steps, so that a training ends with a checkpoint."""

import os
import signal
import sys
from collections.abc import Callable

from scripts.training.options import processes


class CtrlC:
    """Makes the first Ctrl-C a question, "stop?", asked between steps; the second one kills.

    Under torchrun no second one kills: it is torchrun that passes the first one on. After 30 s it
    ends whoever is still there.
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


def at_once(main: Callable[[], int]) -> int:
    """Run a program; what ends it by Ctrl-C, and not by a question, ends it without a traceback."""
    try:
        return main()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\nstopped at once: --resume goes on from the last checkpoint", file=sys.stderr)
        return 130  # what a shell reports of a program that Ctrl-C ended
