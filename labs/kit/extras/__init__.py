"""Packages that are not installed with the course.

jax_devices     functions in a process in which JAX has any number of devices
missing_extra   notebooks whose extra is missing: they say so, and their cells pass
"""
