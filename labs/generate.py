"""Generation: one token after the other, with a cache of the keys and values of all earlier tokens.

    step        tokens sent through the model    attention to                      tokens in the cache afterwards
    first       the prompt, T tokens             the prompt itself                 T
    n-th after  the token chosen last            all in the cache, and itself      T + n

Without a cache, the n-th step would send all T + n tokens through the model again, to compute the same keys and values
as before.  With a cache, a step costs one token's arithmetic and reads every weight once, so memory bandwidth sets the
pace.  Several ranks that each read a part of the weights are faster than one rank, unless their communication takes
longer than the reading that they save (`labs.cost.token_seconds`).

During generation, each attention's core is replaced by one with a cache, and all positions but the last are dropped
after the last layer, since only the last logits of the prompt are used.  Nothing else in the model changes, so a model
whose attention is split by heads generates in the same way: a rank's cache has the heads of its own projections, every
rank computes the same logits, and so all ranks choose the same token.

Shape suffixes are those of `labs.model`.

Source: Shazeer 2019, arXiv 1911.02150, section 2.4 (a step reads all keys and values, and computes little).
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.model import GPT, Attention, Core
from labs.rope import at_least_float32, rotate


def generate(model: GPT, prompt_BT: Tensor, count: int, temperature: float = 0.0, seed: int = 0) -> Tensor:
    """Return the prompts with `count` more tokens each, [B, T + count].

    prompt_BT: token ids, int64 or int32
    count: number of tokens to generate
    temperature: 0 takes the likeliest token; above 0, tokens are drawn from softmax(logits / temperature)
    seed: seed of the random numbers for these draws

    Raises TypeError or ValueError, before anything is computed, for arguments from which nothing can be generated.
    """
    require(model, prompt_BT, count, temperature)
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = [prompt_BT]
    # The cache has no room for the last token of all, which never goes through the model.
    with cached(model, prompt_BT.shape[1] + count - 1), last_position(model):
        for _ in range(count):
            logits_BV = model(tokens[-1])[:, 0]
            tokens.append(choose(logits_BV, temperature, generator))
    return torch.cat(tokens, dim=1)


def choose(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose the next token of each sequence, [B, 1].

    Gumbel's trick: let noise -log(e) be added to each logit, with e drawn from the exponential distribution.  With this
    noise, the index of the largest sum is a draw from the softmax.  Logits that differ only in their last digits, as
    those of a split model do, still give the same token.
    """
    scores_BV = at_least_float32(logits_BV)
    if temperature > 0:
        # The noise is drawn on the CPU, so that a seed gives the same numbers on every device.
        e_BV = torch.empty(scores_BV.shape, dtype=torch.float64, device="cpu").exponential_(generator=generator)
        scores_BV = scores_BV - temperature * e_BV.log().to(scores_BV)
    return scores_BV.argmax(dim=-1, keepdim=True)


@contextmanager
def cached(model: GPT, tokens: int) -> Iterator[list["CachedCore"]]:
    """Let each call of the model inside this context continue where the last call ended, without autograd.

    tokens: the largest number of tokens that a sequence will have

    Yields the caches, one per layer, for callers who want to look inside.
    """
    attentions = [layer.attention for layer in model.layers.values()]
    cores = [attention.core for attention in attentions]
    caches = [CachedCore(core, tokens) for core in cores]
    try:
        exchange(attentions, caches)
        with torch.no_grad():
            yield caches
    finally:
        exchange(attentions, cores)


@contextmanager
def last_position(model: GPT) -> Iterator[None]:
    """Let the model compute, and gather, the logits of the last position alone, [B, 1, V], inside this context."""
    hook = model.norm.register_forward_pre_hook(lambda norm, args: args[0][:, -1:])
    try:
        yield
    finally:
        hook.remove()


def exchange(attentions: Iterable[Attention], cores: Iterable[Core]) -> None:
    for attention, core in zip(attentions, cores, strict=True):
        attention.core = core


class CachedCore(Core):
    """An attention core with a cache: new tokens take the positions after the cached ones, and attend to all of these.

    keys_BKTE holds rotated keys.  From the first call on, keys_BKTE and values_BKTE have room for all tokens.
    """

    def __init__(self, core: Core, tokens: int) -> None:
        super().__init__(core.rope_base, core.rope_scaling)
        self.tokens, self.past = tokens, 0
        self.keys_BKTE = self.values_BKTE = torch.empty(0)

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        past, new = self.past, q_BHTE.shape[2]
        positions_T = torch.arange(past, past + new, device=q_BHTE.device)
        q_BHTE, k_BKTE = (rotate(heads, positions_T, self.rope_base, self.rope_scaling) for heads in (q_BHTE, k_BKTE))
        k_BKTE, v_BKTE = self.remember(k_BKTE, v_BKTE)
        # is_causal aligns the first query with the first key, which is right only for a prompt.
        mask = positions_T[:, None] >= torch.arange(past + new, device=q_BHTE.device) if past and new > 1 else None
        return F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=past == 0, enable_gqa=True
        )

    def remember(self, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values to the cache, and return all keys and values that the cache then holds."""
        batch, heads, new, size = k_BKTE.shape
        if self.past == 0:
            self.keys_BKTE, self.values_BKTE = (k_BKTE.new_empty(batch, heads, self.tokens, size) for _ in range(2))
        if batch != len(self.keys_BKTE) or self.past + new > self.tokens:
            raise ValueError(
                f"{batch} x {new} tokens do not fit the cache, which has {len(self.keys_BKTE)} x {self.past} "
                f"and room for {self.tokens} per sequence: begin with another cached(model, tokens)"
            )
        here = slice(self.past, self.past + new)
        self.keys_BKTE[:, :, here], self.values_BKTE[:, :, here] = k_BKTE, v_BKTE
        self.past += new
        return self.keys_BKTE[:, :, : self.past], self.values_BKTE[:, :, : self.past]


def require(model: GPT, prompt_BT: Tensor, count: int, temperature: float) -> None:
    """Raise TypeError or ValueError for arguments from which nothing can be generated."""
    if not isinstance(model, GPT):
        raise TypeError(f"generate() takes a GPT, not a {type(model).__name__}: if it is wrapped, give the GPT itself")
    if not isinstance(prompt_BT, Tensor) or prompt_BT.ndim != 2 or prompt_BT.dtype not in (torch.int64, torch.int32):
        given = f"{prompt_BT.dtype} {tuple(prompt_BT.shape)}" if isinstance(prompt_BT, Tensor) else f"{prompt_BT!r:.60}"
        raise ValueError(f"the prompt is {given}: it must be int64 in the shape [batch, tokens]; give one as x[None]")
    if prompt_BT.numel() == 0:
        raise ValueError(f"the prompt of shape {tuple(prompt_BT.shape)} is empty: give at least one token")
    if count < 1:
        raise ValueError(f"count is {count}: ask for 1 token at least")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: it must be 0, for the likeliest token, or positive")
    config, length = model.config, prompt_BT.shape[1] + count
    if length > config.context:
        raise ValueError(
            f"{prompt_BT.shape[1]} tokens and {count} more are {length}, and the context is {config.context}: "
            "ask for fewer tokens, or build the model with dataclasses.replace(config, context=...)"
        )
    lowest, highest = (int(end) for end in prompt_BT.aminmax())
    if lowest < 0 or highest >= config.vocab:
        raise ValueError(
            f"the prompt has token {lowest if lowest < 0 else highest}: the vocabulary of {config.vocab} ends at "
            f"{config.vocab - 1}"
        )
