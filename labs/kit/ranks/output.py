"""What the ranks print, line by line as it comes, each line with its rank before it.

Progress bars work: a piece that ends in a carriage return is shown at once and written over by the next.
"""

from __future__ import annotations

import re
import sys

MOST_BYTES = 1 << 20  # of one rank; a loop that prints tensors would otherwise bury the notebook
PIECE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")


class Lines:
    """Cuts the ranks' byte streams into prefixed lines on `sys.stdout`."""

    def __init__(self, ranks: int) -> None:
        self.rest = [b""] * ranks
        self.room = [MOST_BYTES] * ranks

    def feed(self, rank: int, data: bytes, last: bool = False) -> None:
        """Show every complete line of what `rank` has written so far, and at the end (`last`) what is left."""
        if self.room[rank] <= 0:
            return
        self.room[rank] -= len(data)
        text = self.rest[rank] + data
        pieces = PIECE.findall(text)
        self.rest[rank] = text[sum(map(len, pieces)) :]
        if self.rest[rank] and (last or (text.startswith(b"\r") and not pieces)):
            pieces.append(self.rest[rank] + (b"\n" if last else b""))
            self.rest[rank] = b""
        shown = "".join(self.prefixed(rank, piece) for piece in pieces)
        if self.room[rank] <= 0:
            limit = f"{MOST_BYTES >> 20} MiB printed: the rest of this rank's output is not shown"
            shown += f"[rank {rank}] {limit} (return it, or write a file)\n"
        if shown:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            sys.stdout.write(shown.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()

    def prefixed(self, rank: int, piece: bytes) -> str:
        text = piece.decode(errors="replace").replace("\r\n", "\n")
        bar = text.startswith("\r")
        body = text.lstrip("\r")
        if not body:
            return "\r" if bar else ""
        return ("\r" if bar else "") + f"[rank {rank}] {body}"
