"""What the ranks print, line by line as it comes, each line with its rank before it.

Progress bars work: a piece that ends in a carriage return is shown at once and written over by the next.
What gloo says of a lost peer, or as it ends the process, is kept back: the diagnosis mostly knows better (see team.py).
A rank that prints more than FIRST bytes is not shown any further until it ends; then come its LAST bytes.
"""

from __future__ import annotations

import re
import sys

FIRST = 1 << 20  # bytes of one rank; a loop that prints tensors would otherwise bury the notebook
LAST = 1 << 16
GLOO_ABORTS = re.compile(
    rb"(terminate called .*|libc\+\+abi: .*)gloo::|  what\(\):  \[enforce fail "
    rb"|\[E.*/gloo/transport/"  # a log of the same error, written only if a thread comes to it before the end
)


class Lines:
    """Cuts the ranks' byte streams into prefixed lines on `sys.stdout`."""

    def __init__(self, ranks: int) -> None:
        self.unfinished = [bytearray() for _ in range(ranks)]
        self.room = [FIRST] * ranks
        self.beyond = [0] * ranks  # bytes that came when the room was used up
        self.end = [bytearray() for _ in range(ranks)]  # and the last of these
        self.aborts = [""] * ranks  # what gloo said, each line after a newline

    def feed(self, rank: int, data: bytes, last: bool = False) -> None:
        """Show every complete line of what `rank` has written so far, and at the end (`last`) what is left."""
        first, more = data[: self.room[rank]], data[self.room[rank] :]
        self.room[rank] -= len(first)
        shown = self.lines(rank, first, last or bool(more))
        if more:
            shown += self.keep_end(rank, more)
        if last and self.beyond[rank]:
            end = bytes(self.end[rank][-LAST:])
            if cut := self.beyond[rank] - len(end):
                shown += f"[rank {rank}] … {cut:,} bytes are not shown …\n"
            shown += self.lines(rank, end, last=True)
        if shown:
            say(shown)

    def keep_end(self, rank: int, data: bytes) -> str:
        """Take what there is no room for; the sentence that says so, the first time."""
        told = f"{FIRST >> 20} MiB printed: only the end of the rest is shown; return it, or write a file"
        sentence = "" if self.beyond[rank] else f"[rank {rank}] {told}\n"
        self.beyond[rank] += len(data)
        self.end[rank] += data
        if len(self.end[rank]) > 2 * LAST:
            del self.end[rank][:-LAST]
        return sentence

    def lines(self, rank: int, data: bytes, last: bool) -> str:
        unfinished = self.unfinished[rank]
        unfinished += data
        if not last and b"\n" not in data and b"\r" not in data:
            return ""
        pieces = bytes(unfinished).splitlines(keepends=True)
        unfinished.clear()
        if pieces and not pieces[-1].endswith((b"\r", b"\n")):
            if last:
                pieces[-1] += b"\n"
            else:
                unfinished += pieces.pop()
        gloo = [piece for piece in pieces if GLOO_ABORTS.match(piece)]
        self.aborts[rank] += "".join("\n" + piece.decode(errors="replace").rstrip() for piece in gloo)
        return "".join(prefixed(rank, piece) for piece in pieces if piece not in gloo)


def say(text: str) -> None:
    """Write to the standard output, whatever that is here: there may be none, or one that cannot be flushed."""
    if sys.stdout is not None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        getattr(sys.stdout, "flush", str)()


def prefixed(rank: int, piece: bytes) -> str:
    text = piece.decode(errors="replace").replace("\r\n", "\n")
    if text == "\r":
        return text
    return f"[rank {rank}] {text}"
