"""What pytest loads first (`-p tools.lean`): what its plugins import along, and nobody here needs, stays away.

jsonschema, which nbval reads notebooks with, looks for a checker of international addresses, which builds 38 grammars
as it is imported: 1.4 s of processor time, in each worker.
"""

import sys

sys.modules["rfc3987_syntax"] = None  # an ImportError, after which jsonschema does without
