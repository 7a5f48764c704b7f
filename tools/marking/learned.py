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
        """Refuse to run here: a check takes what it is given for a function, and calls it on ranks only."""
        raise TypeError(f"{self.__name__} runs on ranks only")


@functools.cache
def namespace(source: str) -> dict[str, Any]:
    """Run a source, once in a process, and return the names that it defines."""
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, FILE, "exec"), names)
    return names


def made(source: str, name: str) -> Any:
    return eval(name, namespace(source))
