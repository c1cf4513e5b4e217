"""Checkpoints that the formats' own public tools make, and what jaxserve computes from them."""
