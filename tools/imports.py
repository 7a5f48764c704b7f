"""The imports of each file, read from the source without executing anything."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LABS = ROOT / "labs"
EMPTY = {LABS / "__init__.py", LABS / "exercises/engine/__init__.py", *(LABS / "kit").rglob("__init__.py")}
FILES = sorted(set(LABS.rglob("*.py")) - EMPTY)


def name_of(path: Path) -> str:
    """Return a module's name: "ddp" for labs/ddp.py, "cost.fit" for labs/cost/fit.py, "cost" for
    labs/cost/__init__.py.
    """
    return ".".join(path.relative_to(LABS).with_suffix("").parts).removesuffix(".__init__")


MODULES = {f"labs.{name_of(path)}" for path in FILES}


def imports(path: Path, at_top: bool = False) -> set[str]:
    """Return the modules that a file imports, anywhere or when it is loaded: "torch", "labs.ddp", "labs.kit.draw".

    In a `__main__.py`, a string that is a module's name counts, too: the table of commands has such.
    """
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif path.stem == "__main__" and isinstance(node, ast.Constant) and node.value in MODULES:
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively; write the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return found


def own(modules: set[str]) -> set[str]:
    return {module.removeprefix("labs.") for module in modules if module.startswith("labs.")}
