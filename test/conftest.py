"""Every test starts from the same state, alone or among others, whatever the order.

The random seed of a test follows from its name, hypothesis draws the same examples every time,
compiled graphs of other tests are forgotten, and sums are taken by one thread. Delayed scales
follow from the history after one sync, but in tests with the fixture ``full_start``. Tests marked
``cuda`` are skipped where there is no CUDA device with float8 tensor cores, and tests marked
``ranks`` run on several processes (`processes.py`).
"""

from __future__ import annotations

import importlib.util
import sys
import zlib

import pytest
import torch
from processes import pool, shorten_the_dynamic_start

from float8.convert.filters import DEFAULT_FILTERS

torch.set_num_threads(1)
STEPS_OF_USERS = shorten_the_dynamic_start()
DEFAULT_FILTERS.clear()  # an H100 would leave small experts, as those of tests, in high precision
if importlib.util.find_spec("hypothesis") is not None:  # scripts/gpu_check.sh does without it
    import hypothesis

    hypothesis.settings.register_profile(
        "float8",
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("float8")


@pytest.fixture
def full_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed casts are dynamic for as many steps as users have."""
    monkeypatch.setattr("float8.distributed.sync.DYNAMIC_STEPS", STEPS_OF_USERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and (reason := _why_no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        return f"{torch.cuda.get_device_name()} has no float8 tensor cores"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The argument ``rank`` has the number of processes, until the test runs on them."""
    if (marker := metafunc.definition.get_closest_marker("ranks")) is not None:
        metafunc.parametrize("rank", marker.args, ids="{}-ranks".format)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    world, name = arguments.pop("rank"), pyfuncitem.originalname
    try:
        pool().run(world, str(pyfuncitem.path), name, **arguments)
    except AssertionError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    return True
