"""Tests of attention to a part of the keys, and of merges, against the softmax over all of them."""

import torch

from labs.cp.partial_softmax import Output, attend, attend_backward, merge
from labs.cp.pieces import Tokens
from tests.cp.test_attention import drawn, packed, reference

T = 13
QUERIES = Tokens(range(T))
PARTS = [Tokens([0, 5, 7, 12]), Tokens([2, 3, 11]), Tokens([1, 4, 6, 8, 9, 10])]


def of(tokens, x):
    return x[:, :, list(tokens.places)]


def pair(keys, k, v):
    return torch.stack((of(keys, k), of(keys, v)))


def grouped(q, k):
    return q.unflatten(1, (k.shape[1], -1))


def test_merged_parts_are_the_whole_in_any_order():
    q, k, v, _ = (x.detach() for x in drawn(4, 2, T))
    expected = reference(q, k, v)
    a, b, c = (attend(grouped(q, k), pair(keys, k, v), QUERIES, keys) for keys in PARTS)
    for merged in (merge(merge(a, b), c), merge(c, merge(b, a)), merge(b, merge(c, a))):
        torch.testing.assert_close(merged[0].flatten(1, 2), expected, rtol=0, atol=1e-14)


def test_a_part_without_a_key_has_no_weight():
    """Check parts that one query sees nothing of, or none does, also if both parts are like this."""
    q, k, v, _ = (x.detach() for x in drawn(2, 2, T))
    nothing = attend(grouped(q, k), pair(Tokens([]), k, v), QUERIES, Tokens([]))
    later = attend(grouped(q, k)[..., :1, :], pair(PARTS[2], k, v), Tokens([0]), PARTS[2])
    assert not nothing[0].any() and not later[0].any()
    whole = attend(grouped(q, k), torch.stack((k, v)), QUERIES, QUERIES)
    for merged in (merge(whole, nothing), merge(nothing, whole)):
        assert all(map(torch.equal, merged, whole))
    assert all(map(torch.equal, merge(nothing, nothing), nothing))


def test_a_large_score_overflows_nowhere():
    q, k, v, _ = (x.detach().float() for x in drawn(2, 2, T))
    parts = [attend(1e4 * grouped(q, k), pair(keys, k, v), QUERIES, keys) for keys in PARTS]
    output, logsumexp = merge(merge(parts[0], parts[1]), parts[2])
    assert output.isfinite().all() and logsumexp.isfinite().all()


def test_backward_of_a_part_is_its_share_of_the_whole():
    """Compare the sum of all parts' dq, and each part's dk and dv, with autograd's."""
    documents = packed(T)
    q, k, v, gradient = drawn(4, 2, T)
    reference(q, k, v, documents).backward(gradient)
    with torch.no_grad():
        queries, g = Tokens(range(T), documents), grouped(gradient, k)
        keys = [Tokens(part.places, documents[:, list(part.places)]) for part in PARTS]
        whole = Output.of(*attend(grouped(q, k), torch.stack((k, v)), queries, queries), g)
        parts = [attend_backward(grouped(q, k), pair(each, k, v), whole, queries, each) for each in keys]
        torch.testing.assert_close(sum(dq for dq, _ in parts).flatten(1, 2), q.grad, rtol=0, atol=1e-14)
        for each, (_, (dk, dv)) in zip(keys, parts, strict=True):
            torch.testing.assert_close((dk, dv), (of(each, k.grad), of(each, v.grad)), rtol=0, atol=1e-14)
