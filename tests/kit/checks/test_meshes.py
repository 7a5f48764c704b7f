"""The checks of notebook 05: what an answer raises is told with its line.  Right and wrong answers: tests/answers."""

import pytest

from labs.kit import check


@pytest.mark.parametrize("name", ["neighbours", "partial_to_shard", "rules", "placements"])
def test_what_it_raises_is_told_with_its_line(name):
    def fn(*args, **options):
        return args[99]

    answer = getattr(check, name)(fn)
    assert answer.ok is False and "IndexError" in answer.text and "args[99]" in answer.text
