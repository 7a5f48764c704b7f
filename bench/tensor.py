"""A training step of the tour's model under tensor parallelism: ours against PyTorch's, with the same plan."""

from bench.figure import Figure
from bench.step import side_by_side


def figures(quick: bool) -> list[Figure]:
    return side_by_side("tensor", ("tp", "tp-sp", "fsdp-tp"), quick)
