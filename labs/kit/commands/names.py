"""Names that an argument may have: any other is refused, with the nearest of them."""

import re
from collections.abc import Collection
from difflib import get_close_matches

SIZE = re.compile(r"(?<![x\d])(\d+)b$")


def known(what: str, name: str, names: Collection[str]) -> str:
    """Return the name if it is one of the names, or else raise ValueError with the nearest one."""
    if name in names:
        return name
    raise ValueError(f"{what} {name!r} is not known: the nearest is {nearest(name, names)!r}, of {', '.join(names)}")


def nearest(name: str, names: Collection[str]) -> str:
    """Return the most similar name; among names with a size, such as llama2-7b, the name with the nearest size."""
    sizes = {each: int(found[1]) for each in names if (found := SIZE.search(each))}
    if sizes and (size := SIZE.search(name)):
        return min(sizes, key=lambda each: abs(sizes[each] - int(size[1])))
    return get_close_matches(name, names, 1, 0)[0]
