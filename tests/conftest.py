"""How the tests share a machine: many at once; those marked `alone` last, each by itself."""

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

os.environ.setdefault("LABS_DEVICE", "cpu")  # the same on every machine, unless `make gpu` says otherwise

# What a rank imports along with a function of a test: before the fork, since it took most ranks most of their time.
course.COURSE += ["pytest", "tests.models"]
course.COURSE += [f"tests.answers.{file.stem}" for file in Path(__file__).parent.glob("answers/[a-z]*.py")]

# The same examples each time, on any machine, however busy it is; none is written to disk.  No constants of the course
# are among them: they depend on what a worker has imported, and each would parse all of it.
settings.register_profile(
    "course", derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=list(HealthCheck)
)
settings.load_profile("course")
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """A script that runs the tests in the background has them ignore interrupts; some wait for one.

    With notebooks, on Linux: their Pythons need not import what the last one did; the workers get this environment.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # what is imported and collected stays
    if config.getoption("nbval", False) and sys.platform == "linux" and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="warm-")
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(warm.pythons(Path(folder.name)).close)
        os.environ["JUPYTER_PATH"] = folder.name


class ANotebookAtATime(LoadScopeScheduling):
    """A unit of work is a test, or what shares something that was made once; these go first.

    A notebook, solved and as shipped: most of its jobs are run in the former (tools/warm/once.py).  A file with a
    fixture of its own.
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
    """One more than there are cores, since ranks wait for each other; with more, they are in each other's way.

    Each takes up to a GB with its ranks.
    """
    return max(1, min(os.cpu_count() + 1, psutil.virtual_memory().available // GB))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from labs.deepspeed import engine  # which start a fork server: not before it knows what to import
    from labs.kit import virtual

    items.sort(key=is_alone)
    missing = {"13_gspmd.ipynb": virtual.missing(), "14_deepspeed.ipynb": engine.missing()}
    for item in items:
        if (reason := missing.get(item.path.name)) and "CI" not in os.environ:  # it runs, and prints something else
            item.add_marker(pytest.mark.skip(reason))


def pytest_collection_finish() -> None:
    """No garbage collection needs to walk through what stays."""
    gc.freeze()
    gc.enable()


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """A test that must be alone waits until no other one runs, and none begins before it has ended."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return (yield)
    with (Path(tempfile.gettempdir()) / f"pytest-of-{session}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        return (yield)
