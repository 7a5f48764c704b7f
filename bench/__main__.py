"""Run the benchmarks named, or all of them, one after the other: python -m bench [record_overhead ...]"""

import subprocess
import sys
from pathlib import Path


def main(names: list[str]) -> None:
    there = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if unknown := set(names) - set(there):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    for name in names or there:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"bench.{name}"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
