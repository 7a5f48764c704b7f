"""Answers to the optional exercise of notebook 09: the types that products and collectives take, and give."""

from itertools import product

from tests.answers import Exercise, from_notebook

answers = Exercise("type_table")
TABLE = answers.right(from_notebook("type_table"), line="11 right programs pass, and 11 wrong ones are refused")
GIVEN = {
    "sum": {"II": "I", "PP": "P", "RR": "R", "RV": "V", "VV": "V"},
    "relu": {"I": "I", "R": "R", "RV": "V", "V": "V"},
}


@answers.right
def in_either_order_and_with_refusals():
    table = {name: {"".join(pair): None for pair in product("RIVP", repeat=2)} for name in ("product", "rows")}
    for letters, result in (("RR", "R"), ("II", "I"), ("VV", "V"), ("RV", "V"), ("RP", "P")):
        table["product"][letters] = table["product"][letters[::-1]] = result
    table["rows"]["VV"] = "P"
    for name, way in zip(
        ("copy", "reduce", "all_reduce", "gather", "scatter", "join", "split", "all_to_all"),
        ("IR", "PI", "PR", "VR", "PV", "VI", "IV", "VV"),
        strict=True,
    ):
        table[name] = {letter: way[1] if letter == way[0] else None for letter in "RIVP"}
    return table | GIVEN


@answers.right
def from_gradients():
    gradient = {"R": "P", "I": "I", "V": "V", "P": "R"}
    table = dict(GIVEN, product={}, rows={"VV": "P"}, all_reduce={"P": "R"}, all_to_all={"V": "V"})
    for forward, backward, (source, result) in (
        ("copy", "reduce", "IR"),
        ("gather", "scatter", "VR"),
        ("join", "split", "VI"),
    ):
        table[forward], table[backward] = {source: result}, {gradient[result]: gradient[source]}
    for a, b in product("RIVP", repeat=2):
        # y = a b: an operand that is the same on all ranks gets summands from a varying or a replicated partner
        result = {"R": "R", "I": "I", "V": "V"}.get(a) if a == b else None
        result = "V" if {a, b} == {"R", "V"} else "P" if {a, b} == {"R", "P"} else result
        if result:
            table["product"]["".join(sorted((a, b)))] = result
    return table


def instead(mistake, **changes):
    """Note a wrong answer: the table with other rules for some operations."""

    def other():
        return TABLE() | changes

    answers.wrong(mistake)(other)


PRODUCT = {"II": "I", "PR": "P", "RR": "R", "RV": "V", "VV": "V"}
instead("the gradients' types, and not the tensors'", copy={"P": "I"}, reduce={"I": "R"}, gather={"P": "V"})
instead("an invariant tensor meets another type", product=PRODUCT | {"IV": "V"})
instead("an invariant tensor meets another type", product=PRODUCT | {"IR": "R", "IV": "V", "IP": "P"})
instead("a product of two sums", product=PRODUCT | {"PP": "P"})
instead("a sum times pieces", product=PRODUCT | {"PV": "P"})
instead("a product by rows gives pieces, or the whole", rows={"VV": "V"})
instead("a product by rows of a whole tensor", rows={"VV": "P", "RV": "P"})
instead("columns give the whole", product=PRODUCT | {"RV": "R"})
instead("copy does not change the type", copy={"I": "I"})
instead("copy, the other way round", copy={"R": "I"})
instead("reduce and all_reduce exchanged, or alike", reduce={"P": "R"})
instead("reduce and all_reduce exchanged, or alike", reduce={"P": "R"}, all_reduce={"P": "I"})
instead("gather and join exchanged, or alike", gather={"V": "I"})
instead("gather and join exchanged, or alike", join={"V": "R"})
instead("pieces are added up", reduce={"P": "I", "V": "I"})
instead("split takes a tensor with a gradient of summands", split={"R": "V"})
instead("an entry too many", gather={"V": "R", "I": "I"})
instead("an entry is missing", product={key: PRODUCT[key] for key in ("II", "RR", "RV", "VV")})
instead("an entry is missing", rows={})
instead("two results", product=PRODUCT | {"VR": "R"})
instead("an operation is missing", copy=None)
instead("a different kind of answer", copy={"I": 1})


@answers.wrong("an operation is missing")
def only_what_is_given():
    return GIVEN


@answers.wrong("a different kind of answer")
def a_list():
    return ["II", "I"]
