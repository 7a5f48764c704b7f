"""Drawings of checkpoints: which rank reads which part of a file, and which files exist at one moment of a save.

reads(size=24, saved=4, loading=3)     the part of each file that each loading rank reads
folder(moments, 3)                     a folder's files at one moment, and the checkpoint that is loaded after a crash
"""

from collections.abc import Sequence

from labs.kit.drawing.palette import INK, KINDS, MUTED, PAPER, RANKS, SOFT, WRONG
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas
from labs.kit.watch.folder_snapshots import FolderSnapshot

WIDE = 720
GONE = "#8C959F"


def reads(size: int, saved: int, loading: int) -> Drawing:
    """Draw a checkpoint's vector of `size` elements, saved by `saved` ranks and loaded by another number of ranks.

    Each rank saves or loads an equal part of the vector.  Each band in the drawing is one read of a slice of one file.
    """
    files, parts = shares(size, saved), shares(size, loading)
    pieces = [
        (rank, file, max(a, c), min(b, d))
        for rank, (a, b) in enumerate(parts)
        for file, (c, d) in enumerate(files)
        if max(a, c) < min(b, d)
    ]
    words = [f"rank {rank} reads {start - files[file][0]}:{stop - files[file][0]} of file {file}"
             for rank, file, start, stop in pieces]  # fmt: skip
    title = f"saved by {saved}, loaded by {loading}"
    canvas = Canvas(WIDE + 100, 190, title, f"{size} elements: " + "; ".join(words) + ".")

    def x(element: float) -> float:
        return 84 + WIDE * element / size

    for y, name, cuts in ((26, "file", files), (128, "rank", parts)):
        canvas.text(72, y + 18, f"{name}s", anchor="end", fill=MUTED)
        for number, (start, stop) in enumerate(cuts):
            fill = SOFT if name == "file" else RANKS[number % len(RANKS)]
            canvas.rect(x(start), y, x(stop) - x(start), 36, fill=fill)
            canvas.text(x((start + stop) / 2), y + 18, f"{name} {number}")
    for rank, _, start, stop in pieces:
        fill = RANKS[rank % len(RANKS)]
        canvas.rect(x(start) + 2, 66, x(stop) - x(start) - 4, 58, fill=fill, radius=0)
        if x(stop) - x(start) > 44:
            canvas.text(x((start + stop) / 2), 95, f"{start}:{stop}", size=11)
    canvas.text(84, 180, f"{len(pieces)} reads; each element is read once", size=12, anchor="start", fill=MUTED)
    return canvas.drawing("\n".join([title, *words]))


def shares(size: int, ranks: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each rank's part of `size` elements; the last parts are shorter, or empty."""
    each = -(-size // ranks)
    return [(min(size, each * rank), min(size, each * (rank + 1))) for rank in range(ranks)]


def folder(moments: Sequence[FolderSnapshot], number: int) -> Drawing:
    """Draw a checkpoint folder at one moment of a save, and the checkpoint that a crash at that moment would leave.

    A dashed outline stands for a file that does not exist at that moment, but at another moment of the save.
    """
    moment, paths = moments[number], sorted({path for each in moments for path in each.files})
    loads = f"a crash now: {f'{moment.newest} is loaded' if moment.newest else 'there is nothing to load'}"
    title = f"moment {number + 1} of {len(moments)}, next: {moment.next}"
    there = ", ".join(moment.files) or "nothing"
    canvas = Canvas(560, 84 + 30 * len(paths), title, f"There: {there}. {loads}.")
    canvas.text(16, 22, title, anchor="start", weight="bold")
    for row, path in enumerate(paths):
        fill = KINDS["temporary"] if ".draft" in path else RANKS[2]
        style = {"fill": fill} if path in moment.files else {"fill": PAPER, "stroke": GONE, "dash": "3 3"}
        canvas.rect(16, 42 + 30 * row, 528, 24, **style)
        canvas.text(26, 54 + 30 * row, path, anchor="start", size=12, fill=INK if path in moment.files else GONE)
    canvas.text(16, 62 + 30 * len(paths), loads, anchor="start", weight="bold", fill=INK if moment.newest else WRONG)
    return canvas.drawing("\n".join([title, f"there: {there}", loads]))
