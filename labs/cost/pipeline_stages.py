"""A stage of a pipeline: the bytes that it saves for backward, and those that it holds while it runs an instruction.

F    saves activations, and leaves the stage's output
B    leaves the gradients of the parameters, and replaces the gradient of the output by that of the input
I    does the same, but leaves for each matrix its input and the gradient of its output instead of its gradient
W    computes the gradients of the matrices from those
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from labs.cost.job import Job
from labs.cost.model_states import FLOAT, Moment, gpt_layers
from labs.cost.saved_activations import High, backward, layer_activations, norm_bytes
from labs.cost.sense import are_whole


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline.

    job: the job of a GPT that has only the stage's layers, with a single micro-batch
    is_first, is_last: whether the stage has the embedding, and whether it has the last norm and the head
    has_table: False if the embedding is tied to the head of another stage of the same rank
    """

    job: Job
    is_first: bool
    is_last: bool
    has_table: bool = True

    @property
    def sizes(self) -> list[int]:
        """Return the elements of each parameter."""
        embedding, *layers, norm, head = (layer.sizes for layer in gpt_layers(self.job.config))
        table = embedding if self.is_first and self.has_table else []
        return [*table, *chain(*layers), *(norm + head) * self.is_last]

    @property
    def vectors(self) -> int:
        """Return the elements of the parameters that are not matrices of a product: embedding and norms."""
        config = self.job.config
        table = config.vocab * config.dim * (self.is_first and self.has_table)
        return table + config.dim * (2 * config.depth + self.is_last)

    @property
    def matrices(self) -> int:
        return sum(self.sizes) - self.vectors

    def times(self, part: str) -> int:
        """Return how often the stage has a part of the model; part: a name that `labs.cost.tp_calls` uses."""
        return {"a layer": self.job.config.depth, "embedding": int(self.is_first)}.get(part, int(self.is_last))

    @property
    def kept(self) -> int:
        """Return the bytes saved from F on, except the batch's tokens and targets."""
        job, end = self.job, 0
        if self.is_last:
            end = job.tokens * (norm_bytes(job) + FLOAT * (job.config.dim + job.config.vocab)) + FLOAT
        return job.config.depth * layer_activations(job) + end

    def for_W(self, passed: int) -> tuple[int, int]:
        """Return the bytes that I leaves for W: inputs of the matrix products, and gradients of their outputs.

        A layer has the inputs of attention, o, mlp and down; and gradients of q, k, v, o, gate, up and down.

        passed: the number of layers that I has passed
        """
        job, config = self.job, self.job.config
        D, HE, KE = config.dim, config.heads * config.head_size, config.kv_heads * config.head_size
        inputs = passed * (2 * D + HE + config.hidden) + D * self.is_last
        outputs = passed * (HE + 2 * KE + 2 * D + 2 * config.hidden) + config.vocab * self.is_last
        return FLOAT * job.tokens * inputs, FLOAT * job.tokens * outputs

    def during(self, kind: str, first: bool, adds_later: bool) -> Iterator[Moment]:
        """Yield the additional bytes while an instruction runs.

        first: whether its gradients are the first ones, so that they are stored, not added to earlier ones
        adds_later: whether gradients are added not one by one, but a layer's when backward has passed it, and those of
            embedding, norm and head at the end of the stage
        """
        if kind == "W":
            largest = self.job.config.dim * max(self.job.config.hidden, self.job.config.vocab * self.is_last)
            new = FLOAT * (self.matrices if first or adds_later else largest)
            yield Moment("W", new) if first else Moment("W", temporary=new)
        highs = backward(self.job, self.is_first, self.is_last) if kind in "BI" else []
        for at in highs:
            received = at.x if at is highs[0] else 0  # it is there already
            now = Moment(at.name, A=at.A - highs[0].A, temporary=at.temporary - received)
            yield now.plus(**self.new(at, first, adds_later)) if kind == "B" else self.in_I(now, at, first)

    def new(self, at: High, first: bool, adds_later: bool) -> dict[str, int]:
        """Return the bytes of the new gradients at a moment of B."""
        if first:
            return {"G": FLOAT * (at.before + at.own)}
        norm_and_head = min(at.before, self.job.config.dim * (1 + self.job.config.vocab))
        return {"temporary": FLOAT * (at.own + norm_and_head if adds_later else at.newest)}

    def in_I(self, now: Moment, at: High, first: bool) -> Moment:
        """Return a moment of I, which has no gradients of matrices but the embedding's, and leaves what W needs."""
        if at.name in ("loss", "head"):
            return now
        inputs, gradients = self.for_W(at.passed + (at.name in ("attention", "norm")))
        if at.name == "layer":  # the input of down
            gradients += FLOAT * self.job.tokens * self.job.config.hidden
        table = FLOAT * at.own if at.name == "embedding" else 0
        now = replace(now, A=now.A + inputs).plus(temporary=gradients)
        return now.plus(G=table) if first else now.plus(temporary=table)


def stages_of(job: Job, layers: int | Sequence[int]) -> list[Stage]:
    """Return the stages of a job.

    layers: number of layers of each stage; or the number of stages, as equal as possible, the longer ones first
    """
    depth = job.config.depth
    if isinstance(layers, int):
        layers = [depth // layers + (n < depth % layers) for n in range(layers)]
    if not are_whole(layers) or sum(layers) != depth or min(layers) < 1:
        raise ValueError(f"stages of {list(layers)} layers: each has 1 or more, and together they have {depth}")
    edges = [(n == 0, n == len(layers) - 1) for n in range(len(layers))]
    jobs = [replace(job, config=replace(job.config, depth=n, tied=False), accumulation=1) for n in layers]
    return [Stage(own, *edge) for own, edge in zip(jobs, edges, strict=True)]
