"""What a configuration of DeepSpeed says, and whether it agrees with itself (labs.deepspeed.configuration)."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from labs.deepspeed import engine
from labs.deepspeed.configuration import BUCKET, batch_sizes, require_known
from labs.kit.checks.answer import Mistake, Wrong, answered
from labs.kit.checks.launching import job
from labs.kit.checks.pencil.sheet import Sheet, as_if, on_paper, part_so, same, so

# ---- a configuration from a description ------------------------------------------------------------------

CLIPS = 1.0  # what is clipped to where nothing is said
NUMBERS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
RUN = 24, 5, 2, 0.5  # this one is tried, too
STARTING = 30.0  # s of the processor: DeepSpeed


def meaning(fn: Callable[..., Any], batch: int, most: int, ranks: int, clip: float | None) -> Any:
    """What the configuration says, or what is wrong with it, in a sentence."""
    config = fn(batch, most, ranks, clip)
    if not isinstance(config, dict):
        return config if config is None else [config]  # a sentence would be taken for one of ours
    try:
        require_known(config)
        sequences, micro, accumulation = batch_sizes(config, ranks)
    except ValueError as error:
        return str(error)
    return {
        "sequences": sequences,
        "micro": micro,
        "accumulation": accumulation,
        "clip": config.get("gradient_clipping", CLIPS),
        "numbers": next((short for key, short in NUMBERS.items() if section(config, key).get("enabled")), "fp32"),
        "stage": section(config, "zero_optimization").get("stage", 0),
    }


def section(config: dict[str, Any], key: str) -> dict[str, Any]:
    return config[key] if isinstance(config.get(key), dict) else {}


def described(batch: int, most: int, ranks: int, clip: float | None) -> dict[str, Any]:
    each = batch // ranks
    micro = max(size for size in range(1, most + 1) if each % size == 0)
    sizes = {"sequences": batch, "micro": micro, "accumulation": each // micro}
    return sizes | {"clip": clip or 0.0, "numbers": "bf16", "stage": 2}


def by_deepspeed(fn: Callable[..., Any]) -> dict[str, Any]:
    """On a rank: what DeepSpeed has read there, after a step by it."""
    made = initialized(nn.Linear(4, 4), fn(*RUN))
    accumulation = made.gradient_accumulation_steps()
    for _ in range(accumulation):
        made.backward(made(torch.ones(made.train_micro_batch_size_per_gpu(), 4, dtype=made.module.weight.dtype)).sum())
        made.step()
    return {
        "sequences": made.train_batch_size(),
        "micro": made.train_micro_batch_size_per_gpu(),
        "accumulation": accumulation,
        "clip": made.gradient_clipping(),
        "numbers": "bf16" if made.module.weight.dtype == torch.bfloat16 else "another",
        "stage": made.zero_optimization_stage(),
    }


def initialized(model: nn.Module, config: dict[str, Any]) -> Any:
    """Its engine; with small buckets, where nothing is said of them."""
    zero = {"reduce_bucket_size": BUCKET} | section(config, "zero_optimization")
    return engine.initialize(model, config | {"zero_optimization": zero}, partial(torch.optim.SGD, lr=0.5))


def require_deepspeed() -> None:
    if told := engine.missing():
        raise Wrong(told, "Has it been added to the course's own Python?")


# fmt: off
REFUSED = (
    Mistake("a key that DeepSpeed does not know",
            "It takes no notice of such a key. How is it spelt, and on which level does it stand?",
            so(lambda found, due: isinstance(found, str) and "is no key" in found)),
    Mistake("batch sizes that do not agree", "train = micro × accumulation × ranks. Which of them can be left out?",
            so(lambda found, due: isinstance(found, str) and "train" in found)),
)
SAID = (
    *REFUSED,
    Mistake("clipped, though nobody said so", "What does DeepSpeed do where the file says nothing?",
            part_so("clip", lambda found, due: due == 0),
            shows="a loss that differs from last month's, and only DeepSpeed is another one"),
    Mistake("clipped to another norm", "What does the description say?", part_so("clip")),
    Mistake("a rank takes the whole batch", "How many ranks share the sequences of a step?",
            part_so("sequences", lambda found, due: found > due),
            shows="a batch that grows with the number of GPUs, and a learning rate that no longer fits it"),
    Mistake("a step of fewer sequences", "Which key has the sequences of all ranks in a step?", part_so("sequences")),
    Mistake("more than a rank can take", "How many sequences fit?", part_so("micro", lambda found, due: found > due)),
    Mistake("smaller micro-batches than need be", "Which sizes divide a rank's share? Which of them fit?",
            part_so("micro")),
    Mistake("not in bfloat16", "Under which key are the numbers, and what turns them on?", part_so("numbers")),
    Mistake("another stage", "Where does the stage stand?", part_so("stage")),
)
# fmt: on


@answered
def configure(fn: Callable[..., Any], seed: int) -> str:
    """`fn(batch, most, ranks, clip) -> configuration`, judged by what it means, and by what DeepSpeed makes of it."""
    require_deepspeed()
    draw, sheets = random.Random(seed), []
    for share, most, clip in ((12, 5, None), (8, 16, 0.5), (9, 4, None), (15, 7, 1.0), (7, 3, 2.0), (16, 16, None)):
        ranks = draw.choice((2, 3, 4, 8))
        arguments = share * ranks, most, ranks, clip
        words = f"{share * ranks} sequences, at most {most} at a time, {ranks} ranks, clip={clip}"
        sheets.append(Sheet(arguments, described(*arguments), words))
    draw.shuffle(sheets)
    question = "What does each key say, and what is said by leaving it out?"
    right = on_paper(partial(meaning, fn), sheets, SAID, question)
    if not same(found := job(by_deepspeed, fn, ranks=RUN[2], seconds=STARTING)[0], described(*RUN)):
        raise Wrong(f"DeepSpeed reads {found}, and not {described(*RUN)}", question)
    return f"{right}, and DeepSpeed takes a step by one of them"


# ---- sizes that contradict each other --------------------------------------------------------------------

Mended = tuple[int, int | None]


def mended(train: int, micro: int, accumulation: int, ranks: int) -> Mended:
    rounded, rest = divmod(train, micro * ranks)
    return train // (micro * accumulation), None if rest else rounded


def or_if_too_few(number: int) -> Callable[..., Mended]:
    """That many micro-batches, where there are fewer sequences than micro × ranks."""

    def fn(train: int, micro: int, accumulation: int, ranks: int) -> Mended:
        was, rounded = mended(train, micro, accumulation, ranks)
        return was, number if train < micro * ranks else rounded

    return fn


# fmt: off
CONTRADICT = (
    Mistake("another batch on another number of ranks", "Fewer ranks, as many micro-batches: what becomes of the step?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), each))),
    Mistake("the wrong way round", "Half the ranks: are there more micro-batches for each, or fewer?",
            as_if(lambda train, micro, each, ranks: (was := train // (micro * each), each * ranks // was))),
    Mistake("rounded, and the batch is another one", "Multiply the three again. Is it the batch?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), train // (micro * ranks))),
            shows="a loss curve that leaves the old one after a move to other machines"),
    Mistake("a fraction of a micro-batch", "Can a rank take 2.67 micro-batches? What does the docstring say then?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), train / (micro * ranks))),
            shows="DeepSpeed refuses the file, or rounds what stands in it"),
    Mistake("none at all, where there are too few sequences", "Fewer sequences than micro × ranks: who goes without?",
            as_if(or_if_too_few(0))),
    Mistake("one at least, and the batch is larger", "Fewer sequences than micro × ranks: is one each train?",
            as_if(or_if_too_few(1))),
    Mistake("rounded up", "Multiply the three again. Is it the batch?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), -(-train // (micro * ranks))))),
    Mistake("the accumulation is left out", "With which number of ranks do the three agree?",
            as_if(lambda *job: (job[0] // job[1], mended(*job)[1]))),
    Mistake("the ranks that are here, and not those it was for", "With which number of ranks do the three agree?",
            as_if(lambda *job: (job[-1], mended(*job)[1]))),
)
# fmt: on


@answered
def mend(fn: Callable[..., Any], seed: int) -> str:
    """`fn(train, micro, accumulation, ranks) -> (ranks they were written for, micro-batches on these ranks)`."""
    draw = random.Random(seed)
    cases = [(64, 4, 8, 1), (256, 4, 8, 1), (8, 2, 1, 1), (48, 4, 3, 8), (96, 4, 2, 8), (256, 8, 8, 16), (60, 5, 1, 8)]
    cases.append((8, 2, 1, 8))  # fewer sequences than micro × ranks
    draw.shuffle(cases)
    sheets = [
        Sheet(case, mended(*case), "train {}, micro {}, accumulation {}, on {} ranks".format(*case)) for case in cases
    ]
    return on_paper(fn, sheets, CONTRADICT, "Which of the three may change, if training is to stay the same?")
