"""Fixtures of the tests of drawings: a figure as matplotlib has it."""

import importlib

import pytest

from labs.kit.drawing.figures import finish


@pytest.fixture
def canvas(monkeypatch):
    """Return a function that draws a figure and returns the canvas of matplotlib behind it."""

    def drawn(figure, *given, **options):
        module = importlib.import_module(figure.__module__)
        kept = []
        monkeypatch.setattr(module, "finish", lambda canvas, *words: kept.append(canvas) or finish(canvas, *words))
        figure(*given, **options)
        return kept[0]

    return drawn
