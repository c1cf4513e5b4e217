"""Compile the programs of a GPU on a machine without one, and hold what came out to a committed table."""
