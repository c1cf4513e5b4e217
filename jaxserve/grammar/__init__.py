"""Constrained output with llguidance: validates what a request asks for, compiles it and makes token masks. No jax."""
