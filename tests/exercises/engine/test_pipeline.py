"""A test of what the checks of notebook 10 say; their answers are in tests/exercises/pipeline."""

from labs import pp
from labs.kit import check


def test_the_first_wrong_instruction_is_named():
    def early(ranks, microbatches):
        first, *others = pp.gpipe(ranks, microbatches)
        return [[*first[1:], first[0]], *others]

    answer = check.gpipe(early, seed=1)
    told = "rank 0 runs 0B0 at its 8th place, but 0F0, which it needs, stands at its 16th"
    assert told in answer.text and told in answer.picture.alt and answer.picture.html in answer._repr_html_()
