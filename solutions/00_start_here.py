# %% [markdown]
# # Start here
#
# This notebook is still being written. The cell below is the whole of it.

# %%
import labs

print(labs.__doc__.splitlines()[0])
