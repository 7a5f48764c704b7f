"""Layouts that follow from others (labs.gspmd.propagation): along a letter, and where two letters meet.

Each tensor is the letters of its dims, and what is known of it the number of the dim that is cut, or None.
"""

from collections.abc import Sequence

Cut = Sequence[int | None]
