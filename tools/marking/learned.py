"""A function of a submission, as the judge holds it: by its source, which runs on ranks only.

The judge hands a Learned to a check as if it were the learner's function, and the check sends it to its ranks.  Only
there does the source become a function, or a class.  The judge itself never runs a line of a submission.
"""

import functools
import linecache
from typing import Any

FILE = "<ipython-input-1-submission>"  # reports call it "cell", as they do in a notebook


class Learned:
    """A function or class of a submission, by the source that defines it, and its name."""

    def __init__(self, source: str, name: str) -> None:
        self.source, self.__name__, self.__qualname__ = source, name, name

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return made, (self.source, self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on a rank of its own, for a check that does so in its own process."""
        from labs.exercises.engine.learner_job import job

        return job(called, self, args, kwargs, ranks=1, record=None)[0]


def called(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


@functools.cache
def namespace(source: str) -> dict[str, Any]:
    """Run a source, once in a process, and return the names that it defines."""
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, FILE, "exec"), names)
    return names


def made(source: str, name: str) -> Any:
    return eval(name, namespace(source))
