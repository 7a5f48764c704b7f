"""Notebooks that need an extra which is not installed: they say so, and their cells pass.

or_skip(engine.missing())
"""


def or_skip(reason: str) -> None:
    """Print the reason, if there is one, and turn all later cells of the notebook into empty ones."""
    if reason:
        from IPython import get_ipython  # imported here, since no rank needs it

        print(f"{reason}. Until then, the cells below do nothing.")
        get_ipython().input_transformers_cleanup.append(lambda lines: [])
