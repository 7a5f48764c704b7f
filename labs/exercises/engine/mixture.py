"""Wrong gradients as linear combinations (mixtures) of the gradients of all micro-batches: which mistake made them?

received on rank 1 = Σ c[rank, i] × (gradient of micro-batch i of that rank)

all c equal             N times too large: summed; k times: the loss was not divided; too small: divided twice
c zero except rank 1's  rank 1 received nothing from the others
only the last column    only the last micro-batch was synchronised
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake
from labs.exercises.engine.value import all_are


@dataclass(frozen=True)
class Made:
    """A gradient as a mixture: times[rank, micro-batch], which is 1 if it is right, of the one received on `rank`."""

    times: Tensor
    rank: int

    @property
    def n(self) -> int:
        return len(self.times)

    @property
    def k(self) -> int:
        return self.times.shape[1]

    @property
    def others(self) -> Tensor:
        return torch.cat([self.times[: self.rank], self.times[self.rank + 1 :]])

    @property
    def description(self) -> str:
        rows = "; ".join(
            f"rank {r}'s {', '.join(f'{c:.2f}' for c in row)}" for r, row in enumerate(self.times.tolist())
        )
        return f"It is made of {rows} times what is due{' of each micro-batch' if self.k > 1 else ''}."

    @property
    def only_the_last(self) -> str | bool:
        """Return the description if the others contributed their last micro-batch and no other; else False."""
        before, last = self.others[:, :-1], self.others[:, -1]
        return self.k > 1 and all_are(before, 0) and not all_are(last, 0) and self.description


# fmt: off
NOTHING = Mistake("nothing synchronised", "Which call makes the other ranks' gradients arrive here?",
                  lambda made: all_are(made.others, 0) and not all_are(made.times[made.rank], 0) and made.description)
ONE_RANK = Mistake("one rank's gradient everywhere", "Is a broadcast a mean?",
                   lambda made: sum(not all_are(row, 0) for row in made.times) == 1 and made.description)
TIED = Mistake("a tied weight reduced twice", "How often does your loop meet a parameter that two modules share?",
               lambda _: True, symptom="too many bytes, by one embedding, or that gradient N times too large")
COEFFICIENTS = (
    Mistake("the gradient is zero", "Who set it to zero, and when?", lambda made: all_are(made.times, 0)),
    Mistake("summed instead of averaged", "By what must the sum over the ranks be divided?",
            lambda made: all_are(made.times, made.n) and made.description,
            symptom="as if the learning rate were N times larger"),
    Mistake("the loss is not divided by the number of micro-batches",
            "What does backward do to a .grad that is there already?",
            lambda made: made.k > 1 and any(all_are(made.times, x) for x in (made.k, made.n * made.k))
                and made.description,
            symptom="as if the learning rate grew with the number of micro-batches"),
    Mistake("averaged twice", "Who divides by the number of ranks, and how often?",
            lambda made: all_are(made.times, 1 / made.n) and made.description),
    Mistake("divided by the wrong number", "How many gradients were added up?",
            lambda made: all_are(made.times, float(made.times[0, 0]))
            and f"It is {float(made.times[0, 0]):.4g} × the mean."),
    Mistake("only the last micro-batch counts", "Where did the gradients of the others go?",
            lambda made: made.k > 1 and all_are(made.times[:, :-1], 0) and made.description),
    Mistake("only the last micro-batch is synchronised",
            "What does your hook see at the last backward: this micro-batch's gradient, or all that is in p.grad?",
            lambda made: made.only_the_last, symptom="right without accumulation, wrong with it"),
    NOTHING,
    ONE_RANK,
    Mistake("", "Which gradients went into this one, and how often?", lambda made: made.description),
)
