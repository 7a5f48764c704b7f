"""Tests of the output of ranks: it is shown at once, and cut if it is too long."""

import time

import pytest

from labs.kit.launch import run


@pytest.mark.parametrize("length", [40_000, 100_000])
def test_a_long_line_is_a_line(capsys, length):
    run(lambda: print("x" * length), ranks=1)
    assert capsys.readouterr().out == f"[rank 0] {'x' * length}\n"


LINES = {
    "one line": lambda: print("first" + "x" * 50_000_000 + "last"),
    "lines of 1 kB": lambda: [print("first")] + [print("x" * 999) for _ in range(50_000)] + [print("last")],
    "pieces without an end": lambda: [print(w, end="", flush=True) for w in ("first", *["x" * 999] * 50_000, "last")],
    "carriage returns": lambda: [print(w, end="\r", flush=True) for w in ("first", *["x" * 999] * 50_000, "last")],
}


@pytest.mark.parametrize("kind", LINES)
def test_the_first_and_last_of_50_mb_are_shown(kind, capsys):
    """Check that it takes under 2 s on a quiet machine, as this process's processor time, which others' load does not
    change.
    """
    began = time.process_time()
    run(LINES[kind], ranks=1, timeout=120)
    assert time.process_time() - began < 2
    out = capsys.readouterr().out
    assert out.startswith("[rank 0] first") and out.rstrip().endswith("last")
    assert "1 MiB printed" in out and "bytes are not shown" in out and len(out) < 1.5 * 2**20


def test_little_more_than_is_shown_at_once_is_shown_whole(capsys):
    run(lambda: print("x" * (2**20 + 9)), ranks=1)
    out = capsys.readouterr().out
    assert out.count("x") == 2**20 + 9 and "not shown" not in out
