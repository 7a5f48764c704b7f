"""A test of the picture of buckets: which ranks need the gradients of each (snapshot: test_gallery)."""

from labs.kit import draw
from labs.kit.drawing.deepspeed_buckets import parts


def test_a_bucket_names_the_ranks_that_need_its_gradients():
    assert list(parts(200, 900, 300)) == [(2, 300), (1, 300), (0, 100)]
    picture = draw.buckets({"first": 900, "middle": 300, "last": 600}, capacity=1000, ranks=2)
    assert picture.alt.endswith("bucket 1: 900 of 1,000 elements; bucket 2: 900 of 1,000 elements.")
    assert [words for words in ("by rank 0<", "by rank 1<", "by ranks 0 and 1<") if words in picture.svg] == [
        "by rank 0<",
        "by rank 1<",
    ]
