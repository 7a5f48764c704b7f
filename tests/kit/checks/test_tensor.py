"""The checks of notebooks 09 and 09b: what a plan raises is told with its line."""

from labs.kit import check


def test_what_it_raises_is_told_with_its_line():
    def fn(config, sequence_parallel):
        return {}[config.heads]

    answer = check.block_plan(fn)
    assert answer.ok is False and answer.question
    assert "KeyError" in answer.text and "{}[config.heads]" in answer.text
