"""Tests of the film of a propagation: its changes end in the layouts of labs.gspmd, and its last frame in its bytes."""

import torch

from labs import gspmd
from labs.dtensor import Replicate, Shard
from labs.kit import play
from labs.kit.explorers.layouts_that_travel import Film

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def two_products(x, w1, w2):
    return ((x @ w1) @ w2,)


def test_film_ends_in_the_layouts_and_the_bytes_of_gspmd():
    graph = gspmd.trace(two_products, torch.ones(8, 4), torch.ones(4, 16), torch.ones(16, 4))
    (x, w1, w2), [y] = graph.arguments, graph.results
    given = {x: [S0, R], w1: [R, S1], w2: [R, S0], y: [S0, R]}
    h = graph.operations[0].outputs[0]
    names = {x: "x", w1: "w1", w2: "w2", y: "y", h: "h"}
    film = Film(graph, {"dp": 2, "tp": 2}, given, names)
    assert film.changes == [((h, 0), S0), ((h, 1), S1)]
    letters = graph.operations[0].letters
    assert [film.heading(1), film.heading(2)] == [
        f"dp passes along i of {letters}: dim 0 of h is cut.",
        f"tp passes along j of {letters}: dim 1 of h is cut.",
    ]
    assert film.heading(3) == f"All layouts are known. Each rank sends {film.program.sent:,} bytes."
    assert "all-reduce of y" in film.picture(3).svg
    assert "all-reduce" not in film.picture(2).svg
    beside = Film(graph, {"dp": 2, "tp": 2}, given, names, "XLA sends as much.")
    assert "XLA sends as much." in beside.picture(3).svg and "XLA sends" not in beside.picture(2).svg
    widget = play.propagation(graph, {"dp": 2, "tp": 2}, given, names)
    still = film.still()
    assert still.html in widget._repr_mimebundle_()[0]["text/html"]
    headings = [film.heading(frame).rstrip(".").replace(">", "&gt;") for frame in (1, 2)]
    assert all(words in still.svg for words in [*headings, "all-reduce of y"])
