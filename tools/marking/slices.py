"""The part of a submission that is marked: the functions that a check is called with, and what these need.

    exercises(cells)                    the Exercises of a notebook, from its own cells: which call is marked, and where
    slice_of(sources, name, functions)  the source of the functions, cut out of a submission

A name needs the statements before the check that bind it, in whichever cell, and the names in these statements in turn.
Nothing else of a submission runs: neither its training runs nor its pictures.
"""

import ast
import re
import symtable
from collections.abc import Sequence
from dataclasses import dataclass

CALL = re.compile(r"\bcheck\.(?!predict\b)(\w+)\(")
OPTIONAL = re.compile(r"^###.*\boptional\b", re.MULTILINE | re.IGNORECASE)
NOT_YET = ast.parse("__import__('types').SimpleNamespace(ok=None)", mode="eval").body
DEFINES = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
FRESH = (*DEFINES, ast.Assign)  # what binds a name anew, so that earlier statements that bind it do not count
MAGIC = re.compile(r"^(\s*)([%!].*)$", re.MULTILINE)


@dataclass(frozen=True)
class Exercise:
    """A check that a notebook calls: its name, the functions that it is given, and the number of the cell."""

    name: str
    functions: tuple[str, ...]  # ("gather", "drop")
    cell: int
    optional: bool


def exercises(cells: Sequence[dict]) -> list[Exercise]:
    """Return the exercises of a notebook, the first call of each check, in their order."""
    found: dict[str, Exercise] = {}
    optional = False
    for at, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if headings := re.findall(r"^#+ .*$", source, re.MULTILINE):
                optional = bool(OPTIONAL.search(headings[-1]))
            continue
        for name in CALL.findall(source) if cell["cell_type"] == "code" else ():
            if name not in found:
                call = next(call for call in calls(parsed(source)) if call.func.attr == name)
                found[name] = Exercise(name, tuple(map(ast.unparse, call.args)), at, optional)
    return list(found.values())


def calls(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of checks in a syntax tree."""
    return [node for node in ast.walk(tree) if is_check(node)]


def is_check(node: ast.AST) -> bool:
    """Return whether a node of a syntax tree is `check.name(...)`."""
    return isinstance(node, ast.Call) and bool(re.fullmatch(r"check\.(?!predict$)\w+", ast.unparse(node.func)))


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a cell, whose magics and !commands do nothing."""
    return ast.parse(MAGIC.sub(r"\1pass", source))


def slice_of(sources: Sequence[str], name: str, functions: Sequence[str]) -> str:
    """Return the source of the functions that the check `name` is called with, and of what they need.

    sources: the sources of the submission's code cells up to the exercise's own, which is the last.
    Raises SyntaxError if the exercise's own cell is not valid Python; in another cell, such a cell binds no name.
    """
    statements: list[ast.stmt] = []
    for source in sources[:-1]:
        try:
            statements += parsed(source).body
        except SyntaxError:
            continue
    for statement in parsed(sources[-1]).body:
        if any(call.func.attr == name for call in calls(statement)):
            break
        statements.append(statement)
    bound = [names_bound(statement) for statement in statements]
    todo = {(each, len(statements)) for fn in functions for each in names_read(fn)}
    done, chosen = set(), set()
    while todo:
        wanted, end = each = todo.pop()
        done.add(each)
        for at in reversed(range(end)):
            if wanted not in bound[at]:
                continue
            statement, chosen = statements[at], chosen | {at}
            reads = names_read(ast.unparse(statement))
            # A function reads when it is called, after all statements; any other statement reads where it stands.
            places = {ast.FunctionDef: [len(statements)], ast.ClassDef: [at, len(statements)]}.get(
                type(statement), [at]
            )
            todo |= {(other, place) for other in reads for place in places} - done
            if isinstance(statement, FRESH) and (isinstance(statement, DEFINES) or wanted not in reads):
                break
    kept = [ast.unparse(Unchecked().visit(statements[at])) for at in sorted(chosen)]
    return "\n\n".join(kept) + "\n"


class Unchecked(ast.NodeTransformer):
    """A change to statements: the checks of earlier exercises say "not yet", so that the course's own functions follow.

    Each exercise is marked by itself, and what a mistake in one leads to costs no points in the next.
    """

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return NOT_YET if is_check(node) else self.generic_visit(node)


def names_read(source: str) -> set[str]:
    """Return the names of the notebook's top level that a source reads, also within its functions."""
    names: set[str] = set()
    tables = [top := symtable.symtable(source, "a cell", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {
            each.get_name()
            for each in table.get_symbols()
            if each.is_global() or (table is top and each.is_referenced())
        }
    return names


def names_bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds at the notebook's top level, or whose attributes or items it sets."""
    names: set[str] = set()
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)  # what is bound inside is not bound outside
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            names |= {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
        elif not isinstance(node, ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return names
