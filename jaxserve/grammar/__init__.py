"""Constrained output on llguidance: what a request asks for, checked, compiled, and turned into token masks. No jax."""
