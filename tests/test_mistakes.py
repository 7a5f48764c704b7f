"""Tests of tests/mistakes.py: a named one changes what stands in the textbook, once; a mutant can run."""

from tests.mistakes import NAMED, draw
from tools.imports import LABS


def test_each_named_one_stands_where_it_is_made():
    counts = [(LABS / file).read_text(encoding="utf-8").count(right) for file, right, _ in NAMED]
    assert counts == [1] * len(NAMED) and len(NAMED) >= 30


def test_mutants_are_drawn_by_a_seed():
    mutants = draw(20, seed=1, prefixes=("",))
    assert mutants == draw(20, seed=1, prefixes=("",)) != draw(20, seed=2, prefixes=("",))
    for each in mutants:
        assert each.text != (LABS / each.file).read_text(encoding="utf-8")
        compile(each.text, each.file, "exec")
    assert all(each.file.startswith("zero/") for each in draw(5, seed=1, prefixes=("zero",)))
