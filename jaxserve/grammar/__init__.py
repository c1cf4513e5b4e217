"""Constrained output with llguidance: checks and compiles a request's constraints and makes token masks. No jax.

translate.py   a JSON schema, regex, EBNF or structural tag becomes a grammar of llguidance
checker.py     a request's grammar is checked in a process of its own (worker.py) before the engine sees it
matcher.py     the engine makes a matcher for each request, which follows its tokens
token_mask.py  the masks of a step's rows; mask_table.py holds those that drafts need
"""
