"""Check that environment.yml, pyproject.toml and constraints.txt agree, and that each dependency states its reason.

conda installs Python; pip installs the course in the same pinned versions as `make` does, so both ways lead to the same
environment.  The check is for readers with conda, which no test installs.  That pip can resolve the pins is shown
wherever `make` sets up its .venv.  Each problem is reported in one sentence.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"name", "channels", "dependencies"}
PIP_PART = ["--constraint constraints.txt", "--editable ."]


def problems(root: Path = ROOT) -> list[str]:
    """Return the problems found, one sentence each."""
    environment = yaml.safe_load((root / "environment.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*conda_problems(environment, project), *pin_problems(root, project), *reason_problems(root)]


def conda_problems(environment: dict, project: dict) -> Iterator[str]:
    """Check the shape of the file, the Python that conda installs, and the part that pip installs."""
    if set(environment) != KEYS:
        yield f"environment.yml has the keys {sorted(environment)}; it takes {sorted(KEYS)}"
        return
    if environment["name"] != project["name"]:
        yield f"the environment is called {environment['name']!r}, the project {project['name']!r}"
    pip_parts = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    if pip_parts != [PIP_PART]:
        yield f"environment.yml lets pip install {pip_parts}; {PIP_PART} gives the versions that are tested"
    packages = dict(text.partition(" ")[::2] for text in environment["dependencies"] if isinstance(text, str))
    if "pip" not in packages:
        yield "environment.yml has a part for pip and does not ask for pip"
    if packages.get("python") != project["requires-python"]:  # both write it alike
        yield f"environment.yml has Python {packages.get('python')}, pyproject.toml {project['requires-python']}"


def pin_problems(root: Path, project: dict) -> Iterator[str]:
    """Check that each package that the project names has exactly one pinned version, which the project admits."""
    pins = {}
    for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            if not version or name in pins:
                yield f"constraints.txt does not pin one version in {line!r}"
            pins[canonicalize_name(name)] = version
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(text for extra in extras for text in extra)]:
        needed = Requirement(text)
        pinned = pins.get(canonicalize_name(needed.name))
        if pinned is None or not needed.specifier.contains(pinned):
            yield f"pyproject.toml needs {text!r}; constraints.txt pins {pinned}"


def reason_problems(root: Path) -> Iterator[str]:
    """Check that each dependency, in both files, states its purpose on its line."""
    lines = (root / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    dependencies = [line for line in lines if re.match(r'\s+"[\w-]+[^"]*",', line)]
    lines = (root / "environment.yml").read_text(encoding="utf-8").splitlines()
    dependencies += [line for line in lines if re.match(r"\s+- ", line) and not line.endswith(("forge", "pip:"))]
    for line in dependencies:
        if "# " not in line:
            yield f"no reason given for {line.strip()!r}"
