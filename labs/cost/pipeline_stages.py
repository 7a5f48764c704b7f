"""A stage of a pipeline: bytes that it holds while it runs an instruction, and after it.

F    leaves the activations saved for backward, and the stage's output
B    leaves the gradients of the parameters, and replaces the gradient of the output by that of the input
I    does the same, but leaves for each matrix its input and the gradient of its output instead of its gradient
W    computes the gradients of the matrices from those
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, Moment, gpt_layers
from labs.cost.saved_activations import Part, Within, layer_activations, norm_bytes
from labs.cost.sense import are_whole
from labs.cost.split_activations import parts_of


@dataclass(frozen=True)
class StageMemory:
    """The bytes of one stage.

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
        ends = [*norm, *head] if self.is_last else []
        table = embedding if self.is_first and self.has_table else []
        return [*table, *(size for layer in layers for size in layer), *ends]

    @property
    def vectors(self) -> int:
        """Return the elements of the parameters that are not matrices of a product: embedding and norms."""
        config = self.job.config
        table = config.vocab * config.dim * (self.is_first and self.has_table)
        return table + config.dim * (2 * config.depth + self.is_last)

    @property
    def matrices(self) -> int:
        return sum(self.sizes) - self.vectors

    @property
    def largest(self) -> int:
        """Return the elements of the largest matrix of a product."""
        config = self.job.config
        return config.dim * max(config.dim, config.hidden, config.vocab * self.is_last)

    def times(self, part: str) -> int:
        """Return how often the stage has a part of the model; part: a name that `labs.cost.tp_calls` uses."""
        return {"a layer": self.job.config.depth, "embedding": int(self.is_first)}.get(part, int(self.is_last))

    # ---- bytes of a micro-batch ------------------------------------------------------------------------------

    @property
    def x(self) -> int:
        """Return the bytes of the stage's input, which are also those of its output."""
        return FLOAT * self.job.tokens * self.job.config.dim

    @property
    def kept(self) -> int:
        """Return the bytes saved from F on, except the batch's tokens and targets."""
        job, end = self.job, 0
        if self.is_last:
            end = job.tokens * (norm_bytes(job) + FLOAT * (job.config.dim + job.config.vocab)) + FLOAT
        return job.config.depth * layer_activations(job) + end

    @property
    def left(self) -> int:
        """Return the bytes saved from I to W: inputs of matrix products."""
        return self.job.config.depth * inputs_of_layer(self.job) + self.x * self.is_last

    @property
    def gradients(self) -> int:
        """Return the bytes of gradients held from I to W: those of the products' outputs.

        The gradient of the stage's own output does not count, since it was received.
        """
        logits = FLOAT * self.job.tokens * self.job.config.vocab
        return self.job.config.depth * gradients_of_layer(self.job) + (logits if self.is_last else -self.x)

    # ---- while an instruction runs ---------------------------------------------------------------------------

    @property
    def parts(self) -> list[Part]:
        """Return the stage's parts, in the order in which backward passes through them."""
        parts = parts_of(self.job)
        return parts[0 if self.is_last else 3 : None if self.is_first else -1]

    def during(self, kind: str, first: bool) -> Iterator[Moment]:
        """Yield the additional bytes while an instruction runs.

        first: whether its gradients are the first ones, so that they are stored, not added to earlier ones
        """
        if kind == "W":
            yield Moment("W", **{"G": FLOAT * self.matrices} if first else {"temporary": FLOAT * self.largest})
        if kind in "BI":
            yield from self.in_backward(first, split=kind == "I")

    def in_backward(self, first: bool, split: bool) -> Iterator[Moment]:
        """Yield the additional bytes in backward.

        The received gradient stays until the end; it takes the place of one that the last layer would have made.
        """
        inputs = gradients = arrived = 0
        before = 2 * INDEX * self.job.tokens + self.kept
        for number, part in enumerate(self.parts):
            came = 0 if self.is_last or number else self.x
            for at in [*down(self.job, part), *part.worst]:
                A, temporary, of_part, newest = self.within(part, at) if split else (0, 0, at.gradients, at.newest)
                new = self.new(of_part, newest, first)
                A = at.A + A + inputs - before
                at = Moment(at.name, arrived, A, at.comm, at.temporary + temporary + gradients)
                yield at.plus(**new).plus(temporary=FLOAT * self.is_last - came)
            A, temporary, of_part = self.ends(part) if split else (0, 0, sum(part.sizes))
            inputs, gradients, arrived = (
                inputs + A,
                gradients + temporary - came * split,
                arrived + FLOAT * of_part * self.stay(part, first),
            )

    def new(self, of_part: int, newest: int, first: bool) -> dict[str, int]:
        """Return the bytes of a part's gradients.

        of_part: elements computed so far; newest: elements of the gradient that was computed last
        """
        return {"G": FLOAT * of_part} if first else {"temporary": FLOAT * newest}

    def stay(self, part: Part, first: bool) -> bool:
        """Return whether the part's new gradients are still held separately when backward has passed the part."""
        return first

    def after(self, kind: str, before_is_here: bool, behind_is_here: bool) -> Moment:
        """Return the bytes after an instruction, minus those before it, except G.

        before_is_here, behind_is_here: whether the stage before, or behind, is on this rank, so that nothing is sent
        """
        came, goes = (0 if self.is_first else self.x), (0 if self.is_last else self.x)
        to_here, from_here = ("temporary" if here else "comm" for here in (before_is_here, behind_is_here))
        match kind:
            case "F":
                left = Moment(kind, A=self.kept - came, temporary=FLOAT * self.is_last)  # the last stage has the loss
                return plus(left, **{"A" if behind_is_here else "comm": goes})
            case "B":
                return plus(plus(Moment(kind, A=-self.kept), **{from_here: -goes}), **{to_here: came})
            case "I":
                return plus(Moment(kind, A=self.left - self.kept, temporary=self.gradients), **{to_here: came})
        return plus(Moment(kind, A=-self.left, temporary=-self.gradients), **{from_here: -goes})

    # ---- backward in two halves ------------------------------------------------------------------------------

    def ends(self, part: Part) -> tuple[int, int, int]:
        """Return the bytes of inputs and of gradients that a part leaves for W, and the elements of its gradients."""
        match part.name.split()[0]:
            case "head":
                return self.x, FLOAT * self.job.tokens * self.job.config.vocab, 0
            case "layer":
                return inputs_of_layer(self.job), gradients_of_layer(self.job), 2 * self.job.config.dim
        return 0, 0, sum(part.sizes)

    def within(self, part: Part, at: Within) -> tuple[int, int, int, int]:
        """Return the additional bytes of inputs and gradients at a moment in a part, if the backward is split.

        Then follow the elements of the gradients so far, and of the newest one.
        """
        f = FLOAT * self.job.tokens * self.job.config.hidden
        match at.name.split()[0]:
            case "mlp" | "up":
                return f, 0, 0, 0
            case "gate":
                return f, f, 0, 0
            case "norm" if part.name != "norm":
                return *self.ends(part), 0
            case "head" | "down":
                return 0, 0, 0, 0
        return 0, 0, at.gradients, at.newest


def plus(at: Moment, A: int = 0, **others: int) -> Moment:
    return replace(at.plus(**others), A=at.A + A)


def down(job: Job, part: Part) -> Iterator[Within]:
    """Yield the moment after the gradient of down's weight was computed, while down's input is still held.

    It matters only if gradients are added to earlier ones.
    """
    if part.name.startswith("layer"):
        mlp, f = part.worst[0], FLOAT * job.tokens * job.config.hidden
        yield Within("down", mlp.A + f, mlp.temporary - 2 * f, mlp.gradients, mlp.gradients)


# ---- inputs of W -----------------------------------------------------------------------------------------


def inputs_of_layer(job: Job) -> int:
    """Return the bytes of the inputs of attention, of o, of the mlp and of down."""
    D, HE, F = job.config.dim, job.config.heads * job.config.head_size, job.config.hidden
    return FLOAT * job.tokens * (2 * D + HE + F)


def gradients_of_layer(job: Job) -> int:
    """Return the bytes of the gradients of the outputs of q, k, v, o, gate, up and down."""
    config = job.config
    heads = (config.heads + 2 * config.kv_heads) * config.head_size
    return FLOAT * job.tokens * (heads + 2 * config.dim + 2 * config.hidden)


def stages_of(job: Job, layers: int | Sequence[int]) -> list[StageMemory]:
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
    return [StageMemory(own, *edge) for own, edge in zip(jobs, edges, strict=True)]
