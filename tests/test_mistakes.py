"""The mistakes that tests/mistakes.py puts into the textbook can be made: what they change stands there, once."""

from tests.mistakes import MISTAKES


def test_each_stands_where_it_is_made():
    assert [mistake for mistake in MISTAKES if mistake.stands() != 1] == []
    assert len(MISTAKES) >= 60
