"""The type of a tensor over ranks: a checker that finds a forgotten border, without a rank and without a number.

    letter    type          on the ranks               its gradient on the ranks
    R         replicated    the same tensor            P: summands of the gradient
    I         invariant     the same tensor            I: the same gradient
    V         varying       each rank has its own      V: each rank has its own
    P         partial       summands of the tensor     R: the same gradient

R and I look alike in forward.  In backward, work that each rank does differently gives each rank a summand of the
gradient (R), and work that all ranks do alike gives each rank the whole gradient (I).  TABLE has the types that an
operation takes, and the type of its result.  A collective between two types has in backward a collective between their
gradients' types, the other way round: `copy` goes from I to R, so its backward goes from P to I, as `reduce` does.
The borders are those of labs.tp.conjugate; `all_reduce` has an all-reduce in backward, too.

    def pair(x, up, down):
        return reduce(rows(torch.relu(copy(x) @ up), down))

    typed(pair, x="I", up="V", down="V")               # prints itself; without copy, it raises a TypeError
    typed(lambda x, w: copy(w, axis="dp") @ x, returns="VV", axes=("dp", "tp"), x="VR", w="IV")      # a letter per axis

Source of the four types: the package spmd_types (github.com/meta-pytorch/spmd_types), its document on local types.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

Table = Mapping[str, Mapping[str, str]]
WORDS = {"R": "replicated", "I": "invariant", "V": "varying", "P": "partial"}
GRADIENT = {"R": "P", "I": "I", "V": "V", "P": "R"}
COLLECTIVES: Table = {
    "copy": {"I": "R"},
    "reduce": {"P": "I"},
    "all_reduce": {"P": "R"},
    "gather": {"V": "R"},
    "scatter": {"P": "V"},
    "join": {"V": "I"},
    "split": {"I": "V"},
    "once": {"R": "I"},
    "all_to_all": {"V": "V"},
}
TABLE: Table = {  # from the letters of the operands, in alphabetical order, to that of the result
    "product": {"II": "I", "PR": "P", "RR": "R", "RV": "V", "VV": "V"},
    "rows": {"VV": "P"},  # a product that sums over a dim of which each rank has a part
    "sum": {"II": "I", "PP": "P", "RR": "R", "RV": "V", "VV": "V"},
    "relu": {"I": "I", "R": "R", "RV": "V", "V": "V"},  # any function that is not linear; equal letters stand once
    **COLLECTIVES,
}


def infix(a: "Typed", sign: str, b: "Typed") -> "Typed":
    return a.program.add("sum" if sign == "+" else "product", f"({a.text} {sign} {b.text})", a, b)


def call(operation: str, *operands: "Typed", axis: str = "") -> "Typed":
    """Add an operation along one axis of the mesh, the last one by default."""
    shown = ", ".join([*(bare(x.text) for x in operands), *[f"{axis=}"] * bool(axis)])
    return operands[0].program.add(operation, f"{operation}({shown})", *operands, axis=axis)


def look_up(rule: Mapping[str, str], letters: Sequence[str]) -> str | None:
    return rule.get("".join(sorted(letters))) or rule.get("".join(sorted({*letters})))


def bare(text: str) -> str:
    return text[1:-1] if text.startswith("(") else text


copy, reduce, all_reduce, gather, scatter, join, split, once, all_to_all, rows = (
    partial(call, name) for name in (*COLLECTIVES, "rows")
)


@dataclass(frozen=True, eq=False)
class Typed:
    """A tensor of a program, with one letter for each mesh axis.

    made: the collective that made the tensor, the collective's axis and operand; or nothing.
    """

    text: str
    letters: str
    program: "Program"
    made: tuple[Any, ...] = ("", "", None)

    __matmul__, __mul__, __add__ = (partialmethod(infix, sign) for sign in "@*+")

    @classmethod
    def __torch_function__(cls, fn: Callable[..., Any], types: Any, args: Any, kwargs: Any = None) -> "Typed":
        x, *others = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Typed)]
        sign = {"matmul": "@", "linear": "@", "mul": "*", "add": "+"}.get(fn.__name__)
        if not (sign and others):
            return x.program.add("relu", f"{fn.__name__}({', '.join(bare(y.text) for y in (x, *others))})", x, *others)
        return infix(infix(x, sign, others[0]), "+", others[1]) if others[1:] else infix(x, sign, others[0])


class Program:
    """The tensors of a function in the order in which they are made; it prints them with their types."""

    def __init__(self, axes: Sequence[str], table: Table, types: Mapping[str, str]) -> None:
        self.axes, self.table = axes, table
        self.tensors = [Typed(name, letters, self) for name, letters in types.items()]

    def __repr__(self) -> str:
        width = max(len(bare(x.text)) for x in self.tensors)
        rows = [(bare(x.text), x.letters, "".join(GRADIENT[letter] for letter in x.letters)) for x in self.tensors]
        return "\n".join(f"{text:{width}}  {mine:4}  {grad}" for text, mine, grad in [("", "type", "gradient"), *rows])

    def add(self, operation: str, text: str, *operands: Typed, axis: str = "") -> Typed:
        """Add the result of an operation; raise TypeError if the table refuses the operands' types."""
        letters, axis = "", axis or self.axes[-1]
        if axis not in self.axes:
            raise ValueError(f"{text}: the axes are {self.axes}")
        for number, along in enumerate(self.axes):
            if along != axis and operation in COLLECTIVES:
                letters += operands[0].letters[number]
            else:
                here = "product" if along != axis and operation == "rows" else operation
                letters += self.result(self.table.get(here, {}), bare(text), operands, number)
        self.tensors.append(
            Typed(text, letters, self, (operation, axis, operands[0]) if operation in COLLECTIVES else Typed.made)
        )
        return self.tensors[-1]

    def result(self, rule: Mapping[str, str], text: str, operands: Sequence[Typed], number: int) -> str:
        letters = [x.letters[number] for x in operands]
        if found := look_up(rule, letters):
            return found
        types = " and ".join(f"{bare(x.text)} is {WORDS[x.letters[number]]}" for x in operands)
        takes = f"and it takes {', '.join(rule)}" if len(rule) == 1 else "which it refuses"
        raise TypeError(
            f"{text}: along {self.axes[number]}, {types} ({''.join(letters)}), {takes}: "
            + (" or ".join(self.mends(rule, operands, number)) or "no single collective mends it")
        )

    def mends(self, rule: Mapping[str, str], operands: Sequence[Typed], number: int) -> Iterator[str]:
        """Yield a collective to write instead of one that made an operand, and one to write around an operand."""
        along, letters = self.axes[number], [x.letters[number] for x in operands]
        named = f", axis={along!r}" if len(self.axes) > 1 else ""
        exchanged = [(x.made[2], f" instead of {x.made[0]}") if x.made[1] == along else (None, "") for x in operands]
        for sources in exchanged, [(x, "") for x in operands]:
            yield from [
                f"write {name}({bare(source.text)}{named}){instead}"
                for name in COLLECTIVES
                for at, (source, instead) in enumerate(sources)
                if source and (new := self.table.get(name, {}).get(source.letters[number]))
                if look_up(rule, [*letters[:at], new, *letters[at + 1 :]])
            ][:1]


def typed(
    program: Callable[..., Typed], returns: str = "", axes: Sequence[str] = ("tp",), table: Table = TABLE, **types: str
) -> Program:
    """Infer the types of all tensors of a program.

    returns: the type that its caller takes; by default invariant, as a loss is that counts once
    types: for each argument of the program, one letter for each of the axes; a parameter that all ranks hold, and
        update alike, is invariant

    Raises TypeError at the first operation that refuses its operands: it names their types, and the call to write.
    """
    returns = returns or "I" * len(axes)
    for name, letters in {**types, "returns": returns}.items():
        if len(letters) != len(axes) or {*letters} - WORDS.keys():
            raise ValueError(f"{name}={letters!r}: give one of the letters R, I, V, P for each axis of {axes}")
    trace = Program(axes, table, types)
    result = program(*trace.tensors)
    for number, letter in enumerate(returns):
        trace.result({letter: letter}, "return", [result], number)
    return trace
