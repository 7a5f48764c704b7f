"""Settings of the tests: many share the machine at once; those marked `alone` come last, each by itself."""

import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

from labs.kit.ranks import forkserver_preload
from tools import warm

ROOT = Path(__file__).parent.parent
GB = 10**9

os.environ.setdefault("LABS_DEVICE", "cpu")  # every machine runs the same tests, unless `make gpu` says otherwise

# Ranks also need these modules for the functions of tests. They are imported before the fork, since importing them took
# most ranks most of their time.
forkserver_preload.COURSE += ["pytest", "tests.models"]
forkserver_preload.COURSE += [
    f"tests.exercises.{file.parent.name}.{file.stem}"
    for file in Path(__file__).parent.glob("exercises/*/[a-z]*.py")
    if file.parent.name != "engine"
]

# Examples are the same each time, on any machine, however busy it is, and none is written to disk. They contain no
# constants of the course: these depend on what a worker has imported, and each worker would parse the whole course.
settings.register_profile(
    "course", derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=list(HealthCheck)
)
settings.load_profile("course")
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """Restore interrupts, which a script that runs the tests in the background has ignored; some tests wait for one.

    With notebooks, on Linux, also start warm Pythons, so that a kernel need not import what the last one did.  The
    workers inherit this environment.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # imported modules and collected tests stay
    if config.getoption("nbval", False) and sys.platform == "linux" and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="warm-")
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(warm.pythons(Path(folder.name)).close)
        os.environ["JUPYTER_PATH"] = folder.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=read_part, default=(1, 1), help="run one part of all tests: 2/3 is the second of three"
    )


def read_part(text: str) -> tuple[int, int]:
    """Return (2, 3) for "2/3".  Raises ValueError, which pytest reports, for what is no part."""
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(f"{text}: the first number must be between 1 and the second")
    return number, parts


def group_of(nodeid: str) -> str:
    """Return the name of a group of tests that run one after the other: a notebook, solved and as shipped, or a file
    with a fixture of its own; any other test is a group by itself.
    """
    file = nodeid.split("::")[0]
    if file.endswith(".ipynb"):
        return Path(file).name
    return file if has_a_fixture(file) else nodeid


def split_in_parts(nodeids: Sequence[str], parts: int) -> list[list[str]]:
    """Return the parts of a run, with whole groups in each; neighbours, which take as long, go to different parts."""
    groups: dict[str, list[str]] = {}
    for nodeid in nodeids:
        groups.setdefault(group_of(nodeid), []).append(nodeid)
    dealt = list(groups.values())
    return [list(chain.from_iterable(dealt[number::parts])) for number in range(parts)]


class ANotebookAtATime(LoadScopeScheduling):
    """A scheduler whose unit of work is a group of tests; large groups go first.

    The solved notebook runs most jobs of the one that is shipped, too (tools/warm/once.py).
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@cache
def has_a_fixture(file: str) -> bool:
    return 'fixture(scope="module")' in (ROOT / file).read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ANotebookAtATime:
    return ANotebookAtATime(config, log)


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores, since ranks wait for each other; more would slow each other down.

    Each worker takes up to a GB with its ranks.
    """
    return max(1, min(os.cpu_count() + 1, psutil.virtual_memory().available // GB))


@pytest.hookimpl(trylast=True)  # after -m has left tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from labs.deepspeed import engine  # the imports start a fork server, which must know first what to import
    from labs.kit.extras import jax_devices

    number, parts = config.getoption("part")
    mine = set(split_in_parts([item.nodeid for item in items], parts)[number - 1])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = sorted((item for item in items if item.nodeid in mine), key=is_alone)
    missing = {"13_gspmd.ipynb": jax_devices.jax_missing(), "14_deepspeed.ipynb": engine.missing()}
    for item in items:
        # CI runs these cells, whose output differs
        if (reason := missing.get(item.path.name)) and "CI" not in os.environ:
            item.add_marker(pytest.mark.skip(reason))


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection."""
    gc.freeze()
    gc.enable()


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Run a test that must be alone when no other one runs, and hold back the others until it has ended."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return (yield)
    with (Path(tempfile.gettempdir()) / f"pytest-of-{session}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        return (yield)
