"""Context parallelism: every sequence cut into pieces, one for each rank, since one device cannot hold it.

Only attention looks at other tokens.  So the ranks hold the same model and the same batch, but each computes a piece of
every sequence, and they meet in attention.

    pieces             the places of each rank's tokens, cut so that all ranks work alike
    partial_softmax    attention to a part of the keys, and the merge of two parts
    ring               keys and values go round
    gathered_keys      keys and values are all-gathered
    ulysses            heads are exchanged for tokens
    cp                 a GPT whose ranks each compute a piece

Usage, for a model, or for q, k and v of this rank's tokens:

    context_parallel(model, group)
    output = ring_attention(q, k, v, Pieces(zigzag(tokens=1000, ranks=4)), group)
"""

# ruff: noqa: F401

from labs.cp.cp import context_parallel
from labs.cp.gathered_keys import gathered_attention
from labs.cp.partial_softmax import merge
from labs.cp.pieces import Pieces, Tokens, contiguous, products, striped, zigzag
from labs.cp.ring import ring_attention
from labs.cp.ulysses import ulysses_attention
