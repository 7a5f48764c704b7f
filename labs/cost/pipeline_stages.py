"""A stage of a pipeline: what it holds while it runs an instruction, and what is there when it is done.

F    what the stage keeps for backward, and what it has made
B    gradients of its parameters; of its input, in place of that of its output
I    the same, but for each matrix its input and the gradient of its output, from which W makes the matrix's gradient
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
    """job: of a GPT that has the stage's layers alone, and a single micro-batch.

    has_table: its embedding is not the head of another stage of the same rank.
    """

    job: Job
    is_first: bool
    is_last: bool
    has_table: bool = True

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        embedding, *layers, norm, head = (layer.sizes for layer in gpt_layers(self.job.config))
        ends = [*norm, *head] if self.is_last else []
        table = embedding if self.is_first and self.has_table else []
        return [*table, *(size for layer in layers for size in layer), *ends]

    @property
    def vectors(self) -> int:
        """Elements of all that is not a matrix of a product: embedding and norms."""
        config = self.job.config
        table = config.vocab * config.dim * (self.is_first and self.has_table)
        return table + config.dim * (2 * config.depth + self.is_last)

    @property
    def matrices(self) -> int:
        return sum(self.sizes) - self.vectors

    @property
    def largest(self) -> int:
        """Elements of the largest matrix of a product."""
        config = self.job.config
        return config.dim * max(config.dim, config.hidden, config.vocab * self.is_last)

    def times(self, part: str) -> int:
        """How often it has this part of the model, by the names of `labs.cost.tp_calls`."""
        return {"a layer": self.job.config.depth, "embedding": int(self.is_first)}.get(part, int(self.is_last))

    # ---- bytes of a micro-batch ------------------------------------------------------------------------------

    @property
    def x(self) -> int:
        """What comes in, and what goes out."""
        return FLOAT * self.job.tokens * self.job.config.dim

    @property
    def kept(self) -> int:
        """From F on, except the batch's tokens and targets."""
        job, end = self.job, 0
        if self.is_last:
            end = job.tokens * (norm_bytes(job) + FLOAT * (job.config.dim + job.config.vocab)) + FLOAT
        return job.config.depth * layer_activations(job) + end

    @property
    def left(self) -> int:
        """From I to W: inputs of matrix products."""
        return self.job.config.depth * inputs_of_layer(self.job) + self.x * self.is_last

    @property
    def gradients(self) -> int:
        """From I to W: gradients of the products' outputs; that of what goes out of the stage has come from behind."""
        logits = FLOAT * self.job.tokens * self.job.config.vocab
        return self.job.config.depth * gradients_of_layer(self.job) + (logits if self.is_last else -self.x)

    # ---- while it runs ---------------------------------------------------------------------------------------

    @property
    def parts(self) -> list[Part]:
        """The stage's parts, as backward passes through them."""
        parts = parts_of(self.job)
        return parts[0 if self.is_last else 3 : None if self.is_first else -1]

    def during(self, kind: str, first: bool) -> Iterator[Moment]:
        """Bytes more than there were before.  first: the gradients that it makes are to stay, and not to be added."""
        if kind == "W":
            yield Moment("W", **{"G": FLOAT * self.matrices} if first else {"temporary": FLOAT * self.largest})
        if kind in "BI":
            yield from self.in_backward(first, split=kind == "I")

    def in_backward(self, first: bool, split: bool) -> Iterator[Moment]:
        """The gradient that came stays until the end, and is not one that the last layer would have made."""
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
        """Bytes of a part's gradients: elements that are made by now, and of the one that was made last."""
        return {"G": FLOAT * of_part} if first else {"temporary": FLOAT * newest}

    def stay(self, part: Part, first: bool) -> bool:
        """Whether its gradients are there by themselves when backward is through with the part."""
        return first

    def after(self, kind: str, before_is_here: bool, behind_is_here: bool) -> Moment:
        """Bytes more than there were before, except G.  ..._is_here: that stage is on this rank, so nothing travels."""
        came, goes = (0 if self.is_first else self.x), (0 if self.is_last else self.x)
        to_here, from_here = ("temporary" if here else "comm" for here in (before_is_here, behind_is_here))
        match kind:
            case "F":
                left = Moment(kind, A=self.kept - came, temporary=FLOAT * self.is_last)  # and the loss
                return plus(left, **{"A" if behind_is_here else "comm": goes})
            case "B":
                return plus(plus(Moment(kind, A=-self.kept), **{from_here: -goes}), **{to_here: came})
            case "I":
                return plus(Moment(kind, A=self.left - self.kept, temporary=self.gradients), **{to_here: came})
        return plus(Moment(kind, A=-self.left, temporary=-self.gradients), **{from_here: -goes})

    # ---- backward in two halves ------------------------------------------------------------------------------

    def ends(self, part: Part) -> tuple[int, int, int]:
        """For a part: bytes of inputs and gradients that are left for W, and elements of gradients that are made."""
        match part.name.split()[0]:
            case "head":
                return self.x, FLOAT * self.job.tokens * self.job.config.vocab, 0
            case "layer":
                return inputs_of_layer(self.job), gradients_of_layer(self.job), 2 * self.job.config.dim
        return 0, 0, sum(part.sizes)

    def within(self, part: Part, at: Within) -> tuple[int, int, int, int]:
        """At a moment: bytes of inputs and of gradients besides, and elements of gradients, of the newest."""
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
    """It counts where gradients are added to others: down's own has been made, and down's input still stands."""
    if part.name.startswith("layer"):
        mlp, f = part.worst[0], FLOAT * job.tokens * job.config.hidden
        yield Within("down", mlp.A + f, mlp.temporary - 2 * f, mlp.gradients, mlp.gradients)


# ---- what W takes ----------------------------------------------------------------------------------------


def inputs_of_layer(job: Job) -> int:
    """Bytes of the inputs of attention, of o, of the mlp and of down."""
    D, HE, F = job.config.dim, job.config.heads * job.config.head_size, job.config.hidden
    return FLOAT * job.tokens * (2 * D + HE + F)


def gradients_of_layer(job: Job) -> int:
    """Bytes of the gradients of the outputs of q, k, v, o, gate, up and down."""
    config = job.config
    heads = (config.heads + 2 * config.kv_heads) * config.head_size
    return FLOAT * job.tokens * (heads + 2 * config.dim + 2 * config.hidden)


def stages_of(job: Job, layers: int | Sequence[int]) -> list[StageMemory]:
    """layers: of each stage; or how many stages there are, as equal as can be, the longer ones first."""
    depth = job.config.depth
    if isinstance(layers, int):
        layers = [depth // layers + (n < depth % layers) for n in range(layers)]
    if not are_whole(layers) or sum(layers) != depth or min(layers) < 1:
        raise ValueError(f"stages of {list(layers)} layers: each has 1 or more, and together they have {depth}")
    edges = [(n == 0, n == len(layers) - 1) for n in range(len(layers))]
    jobs = [replace(job, config=replace(job.config, depth=n, tied=False), accumulation=1) for n in layers]
    return [StageMemory(own, *edge) for own, edge in zip(jobs, edges, strict=True)]
