"""Shared code of several tests of labs.dtensor."""

import torch

NAMES = ("dp", "tp")


def placements(lib, word):
    letters = {"R": lib.Replicate(), "P": lib.Partial()}
    return [letters.get(letter) or lib.Shard(int(letter)) for letter in word]


def turned(x):
    """Mix the two halves of a head, as labs.rope.rotate does."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * 2 - second * 3, second * 2 + first * 3), dim=-1)


def to(word):
    def moved(x):
        return x

    moved.__name__, moved.to = f"to {word}", word
    return moved


TOKENS = torch.tensor([[0, 5, 2], [3, 3, 1]])


def weights(y):
    return torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
