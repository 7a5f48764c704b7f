"""The marks of answers in a notebook's source, and the source without them: what a learner begins with.

The generator, the site and the marking use them; jupytext and nbval are not needed here.
"""

import hashlib
import re
import textwrap
from collections.abc import Sequence
from typing import Any

BEGIN = re.compile(r"^(\s+)### BEGIN SOLUTION\s*$")
END = re.compile(r"^\s+### END SOLUTION\s*$")
GUESS = re.compile(r"^(\w+ = ).+(  # your (?:number|line).*)$")  # a guess: the learner's notebook has None here
STUB = 'raise NotImplementedError("your turn")'


class SourceError(ValueError):
    """An error in the source of a notebook: it breaks a convention of the generator."""


def cut_answers(source: str) -> str:
    """Replace the lines between the marks by a stub, at the marks' own indentation, and each guess by None.

    Raises SourceError if marks are not paired, or not inside a function: outside, the stub would stop the notebook,
    which has to run from top to bottom as shipped.
    """
    lines, inside = [], False
    for line in source.splitlines():
        begin, end = BEGIN.match(line), END.match(line)
        if (begin and inside) or (end and not inside) or (line.startswith("### ") and "SOLUTION" in line):
            raise SourceError(f"marks around a solution go in pairs, inside a function: {line.strip()!r}")
        if begin:
            lines += textwrap.indent(STUB, begin[1]).splitlines()
        elif not inside and not end:
            lines.append(GUESS.sub(r"\1None\2", line))
        inside = bool(begin) or (inside and not end)
    if inside:
        raise SourceError("'### BEGIN SOLUTION' without '### END SOLUTION'")
    return "\n".join(lines)


def digest(cells: Sequence[Any]) -> str:
    """Return a hash of the cells' sources. Outputs do not count: running a notebook is not editing it."""
    return hashlib.sha256(repr([cell["source"] for cell in cells]).encode()).hexdigest()[:16]
