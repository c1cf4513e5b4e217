"""Constrained output with llguidance: checks and compiles a request's constraints and makes token masks. No jax."""
