"""type_table: the types that a product and each collective take and give, along one axis of a mesh.

The checker of labs.tp.rank_types applies the learner's table to right and wrong programs.  A wrong table passes a wrong
program or refuses a right one; if the programs do not show a wrong entry, the entry is compared.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from labs.exercises.engine.answer import Mistake, Wrong, answered, first, refuse, show
from labs.exercises.engine.on_paper import Sheet, each_judged
from labs.tp.rank_types import TABLE, all_reduce, all_to_all, copy, gather, join, reduce, rows, scatter, split, typed

EXPECTED = {operation: rule for operation, rule in TABLE.items() if operation != "once"}  # no notebook has used it yet
SPLIT = {"x": "V", "up": "V", "down": "V", "norm": "I"}
WHOLE = SPLIT | {"x": "I"}
# fmt: off
RIGHT = (  # the words for a program, the program, its arguments' types, and the type that its caller takes
    ("a pair with its residual", lambda x, up, down: x + reduce(rows(torch.relu(copy(x) @ up), down)), WHOLE, "I"),
    ("two pairs with one border in between",
     lambda x, up, down: reduce(rows(all_reduce(rows(copy(x) @ up, down)) @ up, down)), WHOLE, "I"),
    ("a pair with sequence parallelism",
     lambda x, up, down: scatter(rows(torch.relu(gather(x) @ up), down)), SPLIT, "V"),
    ("a norm on shards", lambda x, norm: join(F.rms_norm(x, (1,)) * copy(norm)), SPLIT, "I"),
    ("a row-parallel linear with its bias", lambda x, up, norm: reduce(rows(x, up)) + norm, SPLIT, "I"),
    ("a head that gathers its logits", lambda x, up: join(copy(x) @ up), WHOLE, "I"),
    ("work that all ranks do alike", lambda x, norm: torch.relu(x * norm), WHOLE, "I"),
    ("a factor before the sum", lambda x, up, norm: reduce(rows(x, up) * copy(norm)), SPLIT, "I"),
    ("a norm that shares its work", lambda x, norm: join(split(x) * copy(norm)), WHOLE, "I"),
    ("a norm, and then columns", lambda x, up, norm: join((copy(x) * copy(norm)) @ up), WHOLE, "I"),
    ("experts", lambda x, up: all_to_all(torch.relu(all_to_all(x) @ up)), SPLIT, "V"),
)
WRONG = (
    ("a pair without copy", lambda x, up, down: reduce(rows(torch.relu(x @ up), down)), WHOLE, "I"),
    ("a pair without its sum", lambda x, up, down: rows(torch.relu(copy(x) @ up), down), WHOLE, "I"),
    ("a pair whose sum adds up the gradient, too",
     lambda x, up, down: all_reduce(rows(torch.relu(copy(x) @ up), down)), WHOLE, "I"),
    ("relu before the sum", lambda x, up, down: join(all_reduce(torch.relu(rows(x, up))) @ down), SPLIT, "I"),
    ("a bias that every rank adds", lambda x, up, norm: reduce(rows(x, up) + copy(norm)), SPLIT, "I"),
    ("a norm on shards without the sum of its gradient", lambda x, norm: join(F.rms_norm(x, (1,)) * norm), SPLIT, "I"),
    ("join before columns", lambda x, up, down: scatter(rows(torch.relu(join(x) @ up), down)), SPLIT, "V"),
    ("columns that are added up", lambda x, up: reduce(copy(x) @ up), WHOLE, "I"),
    ("a product of two sums before they are made", lambda x, up, down: reduce(rows(x, up) * rows(x, down)), SPLIT, "I"),
    ("a gradient that is added up twice", lambda x, up: join(copy(copy(x)) @ up), WHOLE, "I"),
    ("columns before the sum is made", lambda x, up, down: join(rows(x, up) @ down), SPLIT, "I"),
)
# fmt: on


class Judged(NamedTuple):
    """A learner's table, and a sentence that says what is wrong with it."""

    table: dict[str, dict[str, str]]
    sentence: str

    def others(self, table: Any, instead: Any) -> list[str]:
        return [f"{op} {letters}" for op in EXPECTED for letters in table[op] if letters not in instead[op]]


def has(*entries: str) -> Callable[[Judged], str | None]:
    """Return a row's test: whether a table has an entry, as "copy I I"; or another result than expected, "rows VV"."""

    def matches(seen: Judged) -> str | None:
        for operation, letters, *result in map(str.split, entries):
            found = seen.table[operation].get(letters)
            if found == result[0] if result else found not in (None, EXPECTED[operation].get(letters)):
                return seen.sentence
        return None

    return matches


def in_order(given: Any) -> dict[str, dict[str, str]]:
    """Return a learner's table with the operands' letters in alphabetical order, and without entries for a refusal."""
    question, kind = "What does the docstring say is returned?", "a different kind of answer"
    if not isinstance(given, dict) or not all(isinstance(rule, dict) for rule in given.values()):
        raise Wrong(f"it returns {show(given)}, and not a table of tables", question, kind)
    if missing := [operation for operation in EXPECTED if operation not in given]:
        raise Wrong(f"the table has no {', '.join(missing)}", question, "an operation is missing")
    table: dict[str, dict[str, str]] = {}
    for operation, rule in given.items():
        for letters, result in ((letters, result) for letters, result in rule.items() if result not in (None, "")):
            if not all(isinstance(name, str) and name and not {*name} - {*"RIVP"} for name in (letters, result)):
                raise Wrong(f"{operation} has the entry {letters!r}: {result!r}", question, kind)
            if table.setdefault(operation, {}).setdefault("".join(sorted(letters)), result) != result:
                raise Wrong(f"{operation} has two results for {letters}", question, "two results")
        table.setdefault(operation, {})
    return table


def judged(sheet: Sheet, given: Any) -> dict[str, dict[str, str]]:
    """Return the learner's table; raise Wrong if it misjudges a program, or has another entry than the course's."""
    table = in_order(given)
    if sentence := first(wrong_with(table)):
        refuse(MISTAKES, Judged(table, sentence), "")
    return table


def wrong_with(table: dict[str, dict[str, str]]) -> Iterator[str]:
    for words, program, types, returns in (*RIGHT, *WRONG):
        names = program.__code__.co_varnames
        try:
            trace = typed(program, returns, table=table, **{name: types[name] for name in names})
        except TypeError as refused:
            if program in (each for _, each, *_ in RIGHT):
                yield f"{words} is right, and your table refuses it:\n{refused}"
        else:
            if program in (each for _, each, *_ in WRONG):
                yield f"{words} is wrong, and your table lets it pass:\n{trace}"
    for operation, rule in EXPECTED.items():
        for letters in {**rule, **table[operation]}:
            found, expected = table[operation].get(letters, "a refusal"), rule.get(letters, "a refusal")
            if found != expected:
                yield f"{operation} of {letters} gives {found}, and not {expected}"


# fmt: off
MISTAKES = (
    Mistake("the gradients' types, and not the tensors'", "Does the table follow a tensor forward, or its gradient?",
            has("copy P I", "reduce I R", "gather P V", "join I V", "split V I")),
    Mistake("an invariant tensor meets another type",
            "Each rank does something different with it. Who adds up the summands of its gradient?",
            has("product IV", "product IR", "product IP"),
            symptom="the border at the input is left out: the loss is right, the gradients before it are not"),
    Mistake("a product of two sums", "Is the sum of a b over the ranks the sum of a times the sum of b?",
            has("product PP"), symptom="two summands are multiplied before the all-reduce"),
    Mistake("a sum times pieces", "The sum is not made yet. What does each rank multiply by its own columns?",
            has("product PV")),
    Mistake("a product by rows gives pieces, or the whole",
            "Each rank has summed over its own part of the dim only. What does it have of the result?", has("rows VV")),
    Mistake("a product by rows of a whole tensor", "Each rank has a part of the dim: of which of the two operands?",
            has("rows RV", "rows RR", "rows II", "rows IV")),
    Mistake("columns give the whole", "Each rank has its own columns. Is the result the same on all ranks?",
            has("product RV")),
    Mistake("copy does not change the type",
            "The tensor is the same before and after. On which side is its gradient a summand, and on which the sum?",
            has("copy I I", "copy R R"), symptom="the two sides of copy look alike, since the tensor is the same"),
    Mistake("copy, the other way round", "Which gradient does its all-reduce take, and which does it return?",
            has("copy R I")),
    Mistake("reduce and all_reduce exchanged, or alike",
            "One sends nothing in backward. What must the gradient of its result be already?",
            has("reduce P R", "all_reduce P I"),
            symptom="gradients N times too large, by torch.distributed.nn.functional.all_reduce"),
    Mistake("gather and join exchanged, or alike",
            "One adds up gradients in backward, and one keeps a piece. Whose gradients are summands?",
            has("gather V I", "join V R")),
    Mistake("pieces are added up", "Is the sum of different columns a tensor of the model?",
            has("reduce V", "all_reduce V", "scatter V")),
    Mistake("split takes a tensor with a gradient of summands",
            "Its backward lays the pieces of the gradient side by side. Does a rank have a summand then?",
            has("split R")),
    Mistake("an entry is missing", "Which tensors can meet there?",
            lambda seen: (lacks := seen.others(EXPECTED, seen.table)) and f"{seen.sentence}\nno {', '.join(lacks)}"),
    Mistake("an entry too many", "What would each rank have of the result, and what of the gradients?",
            lambda seen: (more := seen.others(seen.table, EXPECTED)) and f"{seen.sentence}\nit has {', '.join(more)}"),
    Mistake("", "What does each rank have of the result, and what of its gradient?", lambda seen: seen.sentence),
)
# fmt: on


@answered
def type_table(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn() -> table`, the types along one axis: {operation: {letters of its operands: letter of its result}}.

    Letters of two operands may stand in any order.  Whatever is not in the table is refused; so is an entry of None.
    """
    each_judged(fn, [Sheet((), None, "the table")], judged)
    return f"{len(RIGHT)} right programs pass, and {len(WRONG)} wrong ones are refused"


type_table.expected = lambda: EXPECTED  # the notebook goes on with this table, if the learner's is not right yet
