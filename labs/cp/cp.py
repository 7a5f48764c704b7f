"""Context parallelism of a GPT: each rank computes a piece of every sequence, and gradients are averaged as ever.

    x, y whole ──▶ cut ──▶ embed ──▶ layers, which meet in attention ──▶ head ──▶ loss of the piece

All ranks of the group read the same batch, and `context_parallel` lets each compute its own piece of it.  Everything
but attention treats each token by itself, and so stays as it is.  Attention needs to know two things about a token:

    its place        in the whole sequence, which decides which keys it sees
    its position     in its document, by which its queries and keys are turned: positions begin anew in each document

**To a parameter, a piece of a sequence is a part of the batch.**  Each rank has the gradient of its own tokens, just as
in data parallelism.  So context parallelism has no averaging of its own: average the gradients over dp and cp together,
with labs.ddp, or shard the model over both with labs.fsdp.

    mesh = Mesh((2, 4), ("dp", "cp"))
    context_parallel(model, mesh.get_group("cp"))
    replicas = Overlapped(model, group=mesh._flatten().get_group())
    replicas(x, y).backward()                                            # x, y: whole sequences, as without cp

**Tensor parallelism splits heads, and context parallelism tokens.**  So each rank along tp has a ring of its own, in
which the queries of its heads meet their keys.  `labs.tp.parallelize` may come before context_parallel or after it, and
labs.ddp or labs.fsdp after both.  Sequence parallelism cuts each piece once more.

    mesh = Mesh((2, 2), ("cp", "tp"))
    parallelize(model, mesh["tp"], gpt_plan(model.config))
    context_parallel(model, mesh.get_group("cp"))

**The loss is weighed.**  Pieces may have different numbers of tokens that count.  Each rank divides the sum of its
losses by a N-th of all tokens that count in its batch; then the mean over the ranks is the batch's mean, and the mean
of the gradients its gradient.  All ranks have the whole targets, so no rank has to send its number.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.agree import fingerprint, first_difference, require_same
from labs.collectives import place
from labs.cp.pieces import Pieces, pick, zigzag
from labs.cp.ring import ring_attention
from labs.model import GPT, IGNORED, Core, require_context
from labs.rope import rotate
from labs.unaveraged import require_averaged


def context_parallel(
    model: GPT, group: ProcessGroup | None = None, attention: Any = ring_attention, cut: Any = zigzag
) -> None:
    """Let every rank of the group compute its own piece of each sequence; the model changes in place.

    The model's forward then takes whole sequences, the same on all ranks of the group, and returns the logits of this
    rank's piece, or its loss, whose mean over the ranks is the batch's.  `model(x, y, documents=n)` packs documents:
    n [B, T] has each token's number, and a document is a run of equal numbers.

    attention: ring_attention, gathered_attention or ulysses_attention.
    cut: zigzag, striped or contiguous.

    Raises ValueError, on every rank, for a model that is no GPT, or if ranks differ in model, attention or cut; in the
    first forward if they differ in the batch, or in the part of the model that tensor parallelism has left them.  An
    optimizer's first step raises RuntimeError if gradients differ.
    """
    mine = {"attention": attention.__name__, "cut": cut.__name__, "config": getattr(model, "config", None)}
    require_same(mine, group, differ)
    sequence = CutSequences(group, attention, cut)
    let_meet(model, GPT, sequence)
    model.__class__ = type(f"Pieced{type(model).__name__}", (Pieced, type(model)), {})
    model.sequence = sequence
    require_averaged(model, group)


def let_meet(model: nn.Module, kind: type[nn.Module], sequence: "CutSequences") -> None:
    """Let the queries of each Core meet the keys of all ranks.

    kind: the class that the model must have, so that nothing but its Cores mixes tokens.
    """
    cores = [(name, each) for name, each in model.named_modules() if isinstance(each, Core | Meeting)]
    if not isinstance(model, kind) or any(type(core) is not Core for _, core in cores):
        raise ValueError(
            f"{type(model).__name__} is not a {kind.__name__} of {kind.__module__} with its own attention, of which "
            "alone is known that nothing else mixes tokens: call ring_attention in your model's attention, and cut its "
            "inputs by Pieces"
        )
    for name, core in cores:
        model.set_submodule(name, Meeting(core, sequence))


class Pieced(nn.Module):
    """A GPT that computes this rank's piece of each sequence."""

    sequence: "CutSequences"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*self.sequence.own(self, *args, **kwargs))


class Meeting(nn.Module):
    """A Core whose queries meet the keys of all ranks."""

    def __init__(self, core: Core, sequence: "CutSequences"):
        super().__init__()
        self.core, self.sequence = core, sequence

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        now, base, scaling = self.sequence, self.core.rope_base, self.core.rope_scaling
        q_BHTE, k_BKTE = (rotate(heads, now.positions, base, scaling) for heads in (q_BHTE, k_BKTE))
        return now.attention(q_BHTE, k_BKTE, v_BKTE, now.pieces, now.group)


class CutSequences:
    """The sequences that a model computes at present, cut into pieces, which all of its layers share.

    pieces: the tokens of every rank.
    positions: the position of each of this rank's tokens in its document, [T], or [B, 1, T] if there are several.
    """

    def __init__(self, group: ProcessGroup | None, attention: Any, cut: Any):
        self.group, self.attention, self.cut, self.compared = group, attention, cut, False

    def own(
        self,
        model: GPT,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        over: float | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, float | None]:
        """Return what the model's forward takes, for this rank's pieces of whole sequences."""
        split = getattr(model, "tensor_parallel", None)
        given = {"tokens": tokens_BT, "targets": targets_BT, "over": over, "documents": documents}
        self.compare(**given, **{"place along tp": None if split is None else split.mesh.get_local_rank()})
        if documents is not None and documents.shape != tokens_BT.shape:
            raise ValueError(
                f"documents have the shape {tuple(documents.shape)}, and tokens {tuple(tokens_BT.shape)}: give each "
                "token the number of its document"
            )
        self.begin(model, tokens_BT.shape[1], tokens_BT.device, documents)
        if targets_BT is None:
            return self.pick(tokens_BT), None, None
        if over is None:  # a tensor, for which the host need not wait
            over = (targets_BT != IGNORED).sum().to(torch.promote_types(next(model.parameters()).dtype, torch.float32))
        return self.pick(tokens_BT), self.pick(targets_BT), over / len(self.pieces.places)

    def begin(self, model: Any, tokens: int, device: torch.device, documents: Tensor | None = None) -> None:
        """Cut sequences of this many tokens from now on.

        model: the GPT, or a stage of it.

        Raises ValueError for sequences of another length than the model, the cut or sequence parallelism can have.
        """
        require_context(model.config, tokens)
        rank, ranks = place(self.group)
        positions = torch.arange(tokens, device=device)
        if documents is not None:
            begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))  # all documents of a row but its first
            documents, positions = begins.cumsum(1), positions - (begins * positions).cummax(1).values
        self.pieces = Pieces(self.cut(tokens, ranks), documents)
        split, lengths = getattr(model, "tensor_parallel", None), [*map(len, self.pieces.places)]
        shards = split.mesh.size() if split and split.shards else 1  # sequence parallelism cuts each piece once more
        if any(length % shards for length in lengths):
            raise ValueError(
                f"pieces of {lengths} tokens are not all divisible by the {shards} ranks of sequence parallelism: "
                f"give sequences of a multiple of {2 * ranks * shards} tokens, or a plan without sequence parallelism"
            )
        self.pick = partial(pick, places=self.pieces.places[rank], dim=-1)
        self.positions = self.pick(positions if documents is None else positions[:, None])

    def compare(self, **given: Any) -> None:
        """Compare the inputs of the first forward, which must be the same on all ranks of the group.

        Later inputs are not compared, as in labs.tp and labs.pp: each forward would need one more message, for which
        the host would wait.
        """
        if not self.compared:
            read = {name: fingerprint(x) if isinstance(x, Tensor) else x for name, x in given.items()}
            require_same(read, self.group, differ)
            self.compared = True


def differ(rank: int, its: dict[str, Any], other: int, others: dict[str, Any]) -> str:
    name = first_difference(its, others)
    return (
        f"{name} is {its[name]!r} on rank {rank}, but {others[name]!r} on rank {other}: all ranks of one group "
        "of context parallelism hold the same part of the model, take the same arguments, and read the same whole "
        "sequences, which the model cuts (data parallelism cuts the batch along another axis of the mesh)"
    )
