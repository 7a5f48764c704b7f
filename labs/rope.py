"""Rotary positions: a token's position is an angle, by which its queries and keys are turned.

A head's numbers are taken in pairs, and each pair is turned at a speed of its own.  So the product of a query and a key
depends on the distance of their tokens, and not on their positions.  A model with rotary positions needs no table of
positions, which would have to be learned, and would end.

Shape suffixes are those of `labs.model`.

Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def rotate(x_BHTE: Tensor, positions_T: Tensor, base: float, scaling: "RopeScaling | None" = None) -> Tensor:
    """Turn pair i of each head by the angle position * base^(-2i / E), so that q·k depends on the distance alone.

    Pair i is (x[i], x[i + E/2]). The angles are computed in float32 at least; the result has the dtype of x.  If rows
    have positions of their own, give them as [B, 1, T].
    """
    first, second = at_least_float32(x_BHTE).chunk(2, dim=-1)
    pairs = first.shape[-1]
    pair = torch.arange(pairs, device=x_BHTE.device, dtype=first.dtype)
    frequencies = base ** (-pair / pairs)
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = positions_T[..., None].to(first.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTE.dtype)


@dataclass(frozen=True)
class RopeScaling:
    """A change of the frequencies that lets a model trained on `context` tokens read `factor` times as many.

    Pairs that turn fewer than `low` times in `context` tokens turn `factor` times slower.  Pairs that turn more than
    `high` times turn as before, and pairs in between at a weighted mean of both speeds.  Llama 3.1 scales its positions
    like this, and transformers calls it "llama3".

    Raises ValueError for a factor below 1, and unless 0 < low < high and 0 < context.

    Source: github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """

    factor: float
    low: float
    high: float
    context: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low < self.high and self.context > 0):
            raise ValueError(f"{self}: factor is 1 or more, low less than high, and all of them positive")

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies as the longer context needs them.

        frequencies: for each pair, the angle from one position to the next
        """
        turns = frequencies * self.context / (2 * math.pi)
        as_before = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (as_before + (1 - as_before) / self.factor)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
