"""Settings of the tests: many share the machine at once; those marked `alone` come last, each by itself."""

import fcntl
import gc
import os
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

from labs.kit.ranks import course
from tools import warm

ROOT = Path(__file__).parent.parent
GB = 10**9

os.environ.setdefault("LABS_DEVICE", "cpu")  # every machine runs the same tests, unless `make gpu` says otherwise

# Ranks also need these modules for the functions of tests. They are imported before the fork, since importing them took
# most ranks most of their time.
course.COURSE += ["pytest", "tests.models"]
course.COURSE += [
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


class ANotebookAtATime(LoadScopeScheduling):
    """A scheduler whose unit of work is a test, or a group of tests that share a fixture; groups go first.

    A group is a notebook, solved and as shipped (the former runs most jobs of both, see tools/warm/once.py), or a file
    with a fixture of its own.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if file.endswith(".ipynb"):
            return Path(file).name
        return file if has_a_fixture(file) else nodeid


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from labs.deepspeed import engine  # the imports start a fork server, which must know first what to import
    from labs.kit.extras import jax_devices

    items.sort(key=is_alone)
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
