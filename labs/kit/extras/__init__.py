"""Packages (extras) that are not installed with the course.

jax_devices     functions that run in a process in which JAX has any number of devices
missing_extra   a notebook whose extra is missing says so, and its cells do nothing
"""
