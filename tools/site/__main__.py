"""The site: every stored solution as a page, with the README as its front.  `make site` writes it to build/site.

    README.md, solutions/*.ipynb, and the files that they link to
        │  sources: links lead to pages, exercises show their stub, answers are folded        pages.py
        ▼
    build/site-pages    what Sphinx reads, with conf.py
        │  Sphinx, myst-nb and furo, whose warnings are errors: a link that leads nowhere is one
        ▼
    build/site          open index.html there, or put the folder on any static host

No cell is run.  Sphinx and its extensions are in build/site-env, which knows neither PyTorch nor the course.
"""

import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from tools.site.pages import EXPLORERS, ROOT, write_sources

CONFIGURATION = Path(__file__).parent
SOURCES, SITE = ROOT / "build/site-pages", ROOT / "build/site"


def main() -> int:
    for folder in (SOURCES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    write_sources(SOURCES)
    strict = ["--fail-on-warning", "--keep-going", "--jobs", "2", "--quiet"]
    places = ["-c", CONFIGURATION, "-d", ROOT / "build/site-doctrees", SOURCES, SITE]
    status = sphinx(["-b", "html", "--fresh-env", *strict, *map(str, places)])
    shutil.copytree(EXPLORERS, SITE / "_static/explorers")
    if status == 0:
        print(f"{len(list(SITE.rglob('*.html')))} pages: open {SITE / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
