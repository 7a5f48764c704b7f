"""Tests of tests/mistakes.py: each line that a mistake changes stands in the textbook, once."""

from tests.mistakes import MISTAKES


def test_each_stands_where_it_is_made():
    assert [mistake for mistake in MISTAKES if mistake.stands() != 1] == []
    assert len(MISTAKES) >= 60
