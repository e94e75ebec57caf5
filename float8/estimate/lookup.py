"""Which device is meant: by name, by file, or the one at hand."""

from __future__ import annotations

import functools
from pathlib import Path

from float8.estimate.devices import DEVICES, Device
from float8.estimate.measure import measure

MEASURED = "measured"


def find_device(device: str | Path | Device) -> Device:
    """The `Device` that a user means.

    Args:
        device: a `Device`; a name of `DEVICES`, in any case; ``"measured"``: this machine, measured
            once per process; or the path of a file that `Device.save` wrote.

    Raises:
        TypeError: neither a name, nor a path, nor a `Device`.
        ValueError: an unknown name, listing the known ones, or a file that is no device.
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, (str, Path)):
        raise TypeError(
            f"device={device!r} is a {type(device).__name__}; needed is the name of a device to "
            f"predict for ({', '.join(DEVICES)}), {MEASURED!r} (this machine), the path of a file "
            "that Device.save wrote, or a float8.estimate.Device"
        )
    device = str(device)
    if device.upper() in DEVICES:
        return DEVICES[device.upper()]
    if device == MEASURED:
        return _measured()
    if _is_file(device):
        return Device.load(device)
    raise ValueError(
        f"unknown device {device!r}; known: {', '.join(DEVICES)}, {MEASURED!r} (this machine), or "
        "the path of a JSON file that Device.save wrote"
    )


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # such as a name that is too long for one
        return False


@functools.cache
def _measured() -> Device:
    return measure()
