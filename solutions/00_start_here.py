# %% [markdown]
# # Start here
#
# This notebook is still being written; the cell below is the whole of it. It needs 1 minutes and 100 MB.

# %%
import labs

print(labs.__doc__.splitlines()[0])

# %% [markdown]
# A clean copy: `git restore notebooks/00_start_here.ipynb`
