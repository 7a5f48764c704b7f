"""The printed output of the ranks, shown line by line as it arrives, each line behind the number of its rank.

Progress bars work: text that ends in a carriage return is shown at once, and overwritten by the next text.
Lines that gloo writes about a lost peer, or as it aborts the process, are not shown: the diagnosis of the failure is
mostly better (see team.py).
After FIRST bytes of output, nothing more of a rank is shown until the rank ends; then its last LAST bytes are shown.
"""

from __future__ import annotations

import re
import sys

FIRST = 1 << 20  # bytes per rank, so that a loop that prints tensors does not fill the notebook
LAST = 1 << 16
GLOO_ABORTS = re.compile(
    rb"(terminate called .*|libc\+\+abi: .*)gloo::|  what\(\):  \[enforce fail "
    rb"|\[E.*/gloo/transport/"  # a thread may log the same error before the process ends
)


class Lines:
    """A splitter that turns the ranks' byte streams into prefixed lines on `sys.stdout`."""

    def __init__(self, ranks: int) -> None:
        self.unfinished = [bytearray() for _ in range(ranks)]
        self.room = [FIRST] * ranks
        self.beyond = [0] * ranks  # number of bytes beyond FIRST
        self.end = [bytearray() for _ in range(ranks)]  # the last of these bytes
        self.aborts = [""] * ranks  # lines that gloo wrote, each after a newline

    def feed(self, rank: int, data: bytes, last: bool = False) -> None:
        """Show every complete line that `rank` has written so far; if `last`, also the unfinished line."""
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
        """Store output beyond FIRST bytes; return a sentence that tells the user so the first time, and "" later."""
        notice = f"{FIRST >> 20} MiB printed: only the end of the rest is shown; return it, or write a file"
        sentence = "" if self.beyond[rank] else f"[rank {rank}] {notice}\n"
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
    """Write text to sys.stdout if the program has one, and flush sys.stdout if it can be flushed."""
    if sys.stdout is not None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        getattr(sys.stdout, "flush", str)()


def prefixed(rank: int, piece: bytes) -> str:
    text = piece.decode(errors="replace").replace("\r\n", "\n")
    if text == "\r":
        return text
    return f"[rank {rank}] {text}"
