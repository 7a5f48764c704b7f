"""Shared code of several tests of labs.cost."""

from labs.model import PRESETS, Config

TINY = PRESETS["tiny"]
CONFIGS = {
    "tiny": TINY,
    "one layer, one head of keys": Config(50, 24, 1, 3, 1, 40, context=20),
    "tied, as many heads of keys": Config(64, 32, 2, 4, 4, 96, context=16, tied=True),
    "one head": Config(50, 16, 2, 1, 1, 20, context=9),
    "wide mlp": Config(291, 30, 1, 3, 3, 220, context=31),
    "two heads of four": Config(50, 8, 1, 2, 1, 20, context=8),
}
