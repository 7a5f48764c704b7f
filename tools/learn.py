"""Open the course in JupyterLab: `make learn` runs this once the environment is there.

Jupyter itself takes the next free port if 8888 is taken, and makes a token.  This file adds: loopback only; the first
notebook; a browser only where there is a screen (else the address is printed); a quiet log; tools/jupyter, so that
saving an untouched notebook changes nothing; and torchrun on the path of its terminals.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "notebooks/00_start_here.ipynb"
AT_HOME = {  # folders that are written inside the home folder, by the variable that moves them
    "JUPYTER_CONFIG_DIR": "jupyter",
    "JUPYTER_DATA_DIR": "share",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "IPYTHONDIR": "ipython",
    "MPLCONFIGDIR": "matplotlib",
}


def has_display(environment: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser opened here would be visible: in a desktop session, not in somebody's ssh terminal."""
    if "SSH_CONNECTION" in environment:
        return False
    return platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & environment.keys())


def command(environment: Mapping[str, str], platform: str, root: bool, folder: Path = ROOT) -> list[str]:
    """Return the JupyterLab command line that serves `folder`; root says whether the user is root."""
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        "--log-level=WARN",  # Jupyter prints the address above this level
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{FIRST}",
        *([] if has_display(environment, platform) else ["--no-browser"]),
        *(["--allow-root"] if root else []),  # containers often have no other user
    ]


def settings(environment: Mapping[str, str], home: Path | None = None) -> dict[str, str]:
    """Return the environment in which Jupyter reads the course's configuration as well as the reader's own.

    Jupyter's terminals find torchrun, which lies beside this Python. If the home folder is not writable, Jupyter,
    IPython and matplotlib keep their files beside this Python, too.
    """
    home = home or Path.home()
    paths = [str(ROOT / "tools/jupyter"), *filter(None, [environment.get("JUPYTER_CONFIG_PATH")])]
    programs = [str(Path(sys.executable).parent), *filter(None, [environment.get("PATH")])]
    added = {"JUPYTER_CONFIG_PATH": os.pathsep.join(paths), "PATH": os.pathsep.join(programs)}
    if not os.access(home, os.W_OK):
        kept = Path(sys.prefix) / "home"
        added |= {name: str(kept / folder) for name, folder in AT_HOME.items() if name not in environment}
        for folder in AT_HOME.values():
            (kept / folder).mkdir(parents=True, exist_ok=True)
    return {**environment, **added}


def main() -> None:
    if not (ROOT / FIRST).exists():
        sys.exit(f"{FIRST} is missing; bring it back with `git restore {FIRST}`")
    print(f"Opening {FIRST} in JupyterLab; its address follows. Stop it with Ctrl-C, twice.", flush=True)
    arguments = command(os.environ, sys.platform, root=os.geteuid() == 0)
    os.execve(arguments[0], arguments, settings(os.environ))


if __name__ == "__main__":
    main()
