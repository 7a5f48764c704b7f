"""Tests of what a product sends in given layouts, by XLA and by the course, and of a program on real ranks."""

import torch

from labs import gspmd
from labs.dtensor import Replicate, Shard
from labs.kit import beat, train
from tests.extras import need_jax

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = (4096, 64), (64, 128)


def test_products_by_xla_and_by_the_course():
    need_jax()
    found = train.products({"A": (SHAPES, (S0, R, S0)), "C": (SHAPES, (S1, S0, S0))})
    assert found["A"] == dict.fromkeys(("XLA", "labs.dtensor", "labs.gspmd"), (0, "nothing"))
    y, x, w = (4 * rows * columns for rows, columns in ((4096, 128), *SHAPES))
    assert found["C"] == {
        "XLA": (y * 3 // 2, "all-reduce"),
        "labs.dtensor": (y * 3 // 4, "reduce-scatter"),
        "labs.gspmd": (x * 3 // 16 + w * 3 // 4, "all-to-all + all-gather"),
    }


def test_a_program_on_ranks_is_one_process():
    def product(x, w):
        return (x @ w,)

    x, w = torch.randn(8, 4), torch.randn(4, 2)
    graph = gspmd.trace(product, x, w)
    given = {graph.arguments[0]: [S0], graph.arguments[1]: [S1]}
    program = gspmd.lower(graph, gspmd.propagate(graph, (2,), given))
    assert train.largest_error(program, product, (x, w), {"tp": 2}) < 1e-6
    assert train.largest_error(program, lambda x, w: (x @ w + 1,), (x, w), {"tp": 2}) > 0.9


def test_one_case_of_the_challenge():
    need_jax()
    fsdp = [(("abc", ""), ("", ""))] * 2, [(("abc", ""), ("abc", ""))] * 3
    gathered_and_all_reduced = 2 * 3 * 7 / 8 * 4 * 128 * 128
    assert beat.fewest_bytes.measured(256, *fsdp) == gathered_and_all_reduced
