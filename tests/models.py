"""Models that are small and awkward, for the tests of every strategy."""

import torch
from torch import nn


class Awkward(nn.Module):
    """A model with tied, frozen, unused and odd-sized parameters, one without dims, one of its own, and a buffer.

    tokens: [batch, time], as `batch` makes them
    branch: also use the last layer, which starts frozen
    """

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(2)])
        self.mixed = nn.ModuleDict({"frozen": nn.Linear(7, 7).requires_grad_(False), "norm": nn.LayerNorm(7)})
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.branch = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.ones(7))
        self.to(dtype)

    def forward(self, tokens, branch=False):
        x = self.embed(tokens) + self.offset
        for layer in self.layers:
            x = x + self.scale * layer(x)
        x = x + self.mixed["norm"](torch.tanh(self.mixed["frozen"](x)))
        if branch:
            x = self.branch(x)
        logits = self.head(x)
        # A mean in bfloat16 would be too coarse to learn from.
        return logits.float().square().mean().to(x.dtype) if x.dtype == torch.bfloat16 else logits.square().mean()


def batch(step, micro_batch):
    """Return tokens for `Awkward`."""
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1000 * step + micro_batch))


def trained_alone(model, optimizer, loss, ranks, steps, micro_batches=1, clip=None):
    """Train a model on one process that never communicates.

    Each rank's gradient is computed separately, of loss(step, number of the micro-batch); the gradients are added in
    the order of the ranks, and divided.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(steps):
        total = [torch.zeros_like(p) for p in trained]
        for rank in range(ranks):
            optimizer.zero_grad()
            for i in range(micro_batches):
                (loss(step, rank * micro_batches + i) / micro_batches).backward()
            for sum_, p in zip(total, trained, strict=True):
                sum_ += p.grad
        for sum_, p in zip(total, trained, strict=True):
            p.grad = sum_ / ranks
        if clip:
            clip(trained)
        optimizer.step()


class Tied(nn.Module):
    """A model from tokens to loss: odd sizes, a weight used twice, a frozen one, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.inside = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                spread = torch.arange(parameter.numel(), dtype=torch.float32).add(number).sin().view(parameter.shape)
                parameter.copy_(spread / 2)

    def forward(self, x_BT, y_BT):
        h_BTD = self.embed(x_BT)
        h_BTD = h_BTD + self.scale * torch.tanh(self.frozen(self.inside(h_BTD)))
        return nn.functional.cross_entropy(self.head(h_BTD).flatten(0, 1), y_BT.flatten())


class OtherTransformer(nn.Module):
    """A transformer as somebody else would build it: other names, biases, LayerNorm, GELU, dropout, learned
    positions.
    """

    def __init__(self, vocabulary=24, width=16, heads=4, hidden=36, blocks=2, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.h = nn.ModuleList([Block(width, heads, hidden, dropout) for _ in range(blocks)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]).expand_as(ids))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Block(nn.Module):
    def __init__(self, width, heads, hidden, dropout):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = SelfAttention(width, heads), FeedForward(width, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(hidden_states=self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden_states):
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        return self.wo(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc_in, self.act, self.fc_out = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc_out(self.act(self.fc_in(x)))


class GPT3Layer(nn.Module):
    """The layer of Korthikanti et al., figures 2 and 3: attention not fused, GELU, dropout after each of the three."""

    def __init__(self, h, a):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])
        self.drops = nn.ModuleList([Masked(0.1), Masked(0.1)])
        self.attention, self.mlp = GPT3Attention(h, a), FeedForward(h, 4 * h)

    def forward(self, x):
        x = x + self.drops[0](self.attention(self.norms[0](x)))
        return x + self.drops[1](self.mlp(self.norms[1](x)))


class GPT3Attention(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.head, self.drop = h // a, Masked(0.1)
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))

    def forward(self, x):
        return self.o(self.core(self.q(x), self.k(x), self.v(x)))

    def core(self, *qkv):
        q, k, v = (x.unflatten(-1, (-1, self.head)).transpose(1, 2).flatten(0, 1) for x in qkv)
        scores = torch.baddbmm(q.new_zeros(()), q, k.mT, beta=0, alpha=self.head**-0.5)
        y = self.drop(scores.softmax(-1)) @ v
        return y.unflatten(0, (len(qkv[0]), -1)).transpose(1, 2).flatten(2)


class Masked(nn.Dropout):
    """A dropout whose mask has one byte per element, as on a GPU."""

    def forward(self, x):
        return torch.native_dropout(x, self.p, self.training)[0]
