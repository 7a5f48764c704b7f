"""Tests of labs.cost's formulas for generation, against published figures and arithmetic by hand.

test_generate measures that a cache holds what `kv_cache` says.
"""

from dataclasses import replace

import pytest

from labs import cost
from labs.model import PRESETS, Config

LLAMA = PRESETS["llama3-8b"]
FREE = cost.LinkClass(begin=0, latency=0, bandwidth=float("inf"))


def test_a_cache_of_llama_3_by_hand():
    # 2 x 32 layers x 8 heads x 128 numbers of 2 bytes: 128 KiB per token, and 1 GiB for 8192 tokens
    assert cost.kv_cache(LLAMA, 1, itemsize=2) == 128 * 1024
    assert cost.kv_cache(LLAMA, 8192, itemsize=2) == 2**30
    # 70B: 2 x 80 x 8 x 128 x 2 bytes; without grouped queries it would be 8 times as much
    assert cost.kv_cache(PRESETS["llama3-70b"], 1, itemsize=2) == 320 * 1024
    assert cost.kv_cache(replace(PRESETS["llama3-70b"], kv_heads=64), 1, itemsize=2) == 8 * 320 * 1024


def test_heads_are_split_and_replicated_where_they_are_too_few():
    whole = cost.kv_cache(LLAMA, 100, batch=3)
    assert [whole // cost.kv_cache(LLAMA, 100, batch=3, ranks=n) for n in (1, 2, 4, 8, 16, 32)] == [1, 2, 4, 8, 8, 8]
    odd = Config(vocab=11, dim=60, depth=1, heads=10, kv_heads=5, hidden=8, context=9)
    a_head = 2 * 6 * 4
    assert [cost.kv_cache(odd, 1, ranks=3, rank=rank) for rank in range(3)] == [2 * a_head, 2 * a_head, a_head]
    assert [cost.kv_cache(odd, 1, ranks=10, rank=rank) for rank in range(10)] == [a_head] * 10
    for ranks in (6, 15):
        with pytest.raises(ValueError, match=f"10 query heads over 5 of keys and values cannot be .* {ranks} ranks"):
            cost.kv_cache(odd, 1, ranks=ranks)


def test_one_device_reads_its_weights_and_its_cache_once():
    # 8.03 billion parameters without the embedding's 0.53; the cache of 1000 tokens
    numbers = 8_030_261_248 - 128_256 * 4096
    token = cost.token_seconds(LLAMA, past=1000, memory=1e12)
    assert token.seconds == token.compute == pytest.approx((2 * numbers + 1000 * 128 * 1024) / 1e12, rel=1e-12)
    # A tied head is the embedding, which is then read.
    assert cost.token_seconds(replace(LLAMA, tied=True), memory=1e12).seconds == pytest.approx(2 * numbers / 1e12)


def test_many_sequences_are_bound_by_arithmetic():
    numbers = 8_030_261_248 - 128_256 * 4096
    one, many = (cost.token_seconds(LLAMA, batch=batch, memory=1e12, flops=1e14) for batch in (1, 1000))
    assert one.seconds == pytest.approx(2 * numbers / 1e12) and many.seconds == pytest.approx(1000 * 2 * numbers / 1e14)
    # q k and the softmax by v: a multiplication and an addition each, for each of the heads' numbers and each token
    longer = cost.token_seconds(LLAMA, batch=1000, past=50, memory=1e15, flops=1e14)
    assert longer.seconds - many.seconds == pytest.approx(1000 * 50 * 32 * 4096 * 4 / 1e14, rel=1e-6)


def test_messages_and_bytes_by_hand():
    # 65 all-reduces of 4096 numbers in 2 bytes and a gather of 128,256: on 2 ranks, one round each
    slow = cost.LinkClass(begin=0.0, latency=1e-3, bandwidth=1e6)
    token = cost.token_seconds(LLAMA, 2, slow)
    assert token.messages == pytest.approx(66 * 1e-3)
    # an all-reduce takes one round of everything, or two rounds of half each: as many bytes; a gather sends a half
    assert token.bytes == pytest.approx((65 * 8192 + 128_256) / 1e6)
    begins = cost.token_seconds(LLAMA, 2, replace(slow, begin=1.0))
    assert begins.messages - token.messages == pytest.approx(66)
    # 8 ranks, with a bandwidth so high that only rounds count: 3 for an all-reduce, and 7 for the gather's ring
    endless = replace(slow, bandwidth=1e30)
    assert cost.token_seconds(LLAMA, 8, endless).messages == pytest.approx((65 * 3 + 7) * 1e-3)
    # only a ring is available: 14 rounds
    ring = replace(endless, algorithms=(cost.ring_seconds,))
    assert cost.token_seconds(LLAMA, 8, ring).messages == pytest.approx((65 * 14 + 7) * 1e-3)


def test_links_without_cost_divide_the_time_by_the_ranks():
    alone = cost.token_seconds(LLAMA, past=512).seconds
    assert cost.token_seconds(LLAMA, 8, FREE, past=512).seconds == pytest.approx(alone / 8)
    # beyond 8 ranks the cache is no longer divided
    assert cost.token_seconds(LLAMA, 16, FREE, past=512).seconds > alone / 16


def test_where_more_ranks_are_slower():
    def seconds(config, ranks, link):
        token = cost.token_seconds(config, ranks, cost.LINK_CLASSES[link], past=64)
        assert token.seconds == token.compute + token.messages + token.bytes
        return token.seconds

    best = {link: min((1, 2, 4, 8), key=lambda ranks: seconds(LLAMA, ranks, link)) for link in cost.LINK_CLASSES}
    assert best == {"NVLink 4": 8, "PCIe 5": 8, "Ethernet, 10 Gb/s": 2}
    one, *more = (seconds(PRESETS["tiny"], ranks, "Ethernet, 10 Gb/s") for ranks in (1, 2, 4))
    assert min(more) > 100 * one
