"""A setting of nbconvert: a page made from a notebook contains the pictures of its prose, wherever the page is sent.

nbconvert's own `--embed-images` leaves out pictures that do not lie below the notebook.
"""

import base64
import re
from pathlib import Path

from nbconvert.preprocessors import Preprocessor

PICTURE = re.compile(r"\.\./images/\w+\.svg")


class Embed(Preprocessor):
    def preprocess_cell(self, cell, resources, index):
        folder = Path(resources["metadata"]["path"])

        def inline(found):
            data = base64.b64encode((folder / found[0]).read_bytes()).decode()
            return f"data:image/svg+xml;base64,{data}"

        if cell.cell_type == "markdown":
            cell.source = PICTURE.sub(inline, cell.source)
        return cell, resources


c.HTMLExporter.preprocessors = [Embed]  # noqa: F821  (Jupyter defines c)
