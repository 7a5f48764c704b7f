"""A notebook that needs an extra, where that is not installed: it says so, and its cells pass.

optional.or_skip(engine.missing())
"""

from IPython import get_ipython


def or_skip(reason: str) -> None:
    """With a reason, print it, and let all cells of the notebook from the next one on do nothing."""
    if reason:
        print(f"{reason}. Until then, the cells below do nothing.")
        get_ipython().input_transformers_cleanup.append(lambda lines: [])
