"""Packages (extras) that are not installed with the course.

jax_devices     functions that run in a process in which JAX has any number of devices
types_of_layers functions that run in a process in which spmd_types sees any number of ranks; the course's layers there
missing_extra   a notebook whose extra is missing says so, and its cells do nothing
"""
