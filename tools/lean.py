"""A plugin that pytest loads first (`-p tools.lean`): it keeps away a slow import that nobody here needs.

nbval reads notebooks with jsonschema, which looks for a checker of international addresses.  This checker builds 38
grammars when it is imported, which takes 1.4 s of processor time in each worker.
"""

import sys

sys.modules["rfc3987_syntax"] = None  # importing it raises ImportError, and jsonschema then works without it.
