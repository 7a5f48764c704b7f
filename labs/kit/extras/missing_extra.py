"""A notebook that needs an extra which is not installed: it says so, and its later cells do nothing.

or_skip(engine.missing())
"""


def or_skip(reason: str) -> None:
    """Print the reason why an extra is missing, and make all later cells do nothing; do nothing if it is ""."""
    if reason:
        from IPython import get_ipython  # imported here, since no rank needs it

        print(f"{reason}. Until then, the cells below do nothing.")
        get_ipython().input_transformers_cleanup.append(lambda lines: [])
