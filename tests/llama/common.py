"""Shared code of several tests of labs.llama: odd shapes."""

from dataclasses import replace

from labs.model import Config
from labs.rope import RopeScaling

# Every size is different, so that no axis can be mistaken for another.
ODD = Config(vocab=37, dim=48, depth=2, heads=6, kv_heads=3, hidden=28, context=40, rope_base=500.0)
LONG = replace(ODD, context=300, rope_scaling=RopeScaling(factor=4.0, low=0.2, high=1.0, context=8), eps=1e-6)
SCALED = {  # one of a head's 4 pairs turns as before, one in between, and two more slowly
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 0.2,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8,
}
