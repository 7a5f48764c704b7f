"""Layouts that follow from others (labs.gspmd.propagation), along a letter, and where two letters meet.

Each tensor is written as the letters of its dims.  Its layout is the number of the dim that is cut, or None if nothing
is known of it.
"""

from collections.abc import Sequence

Cut = Sequence[int | None]
