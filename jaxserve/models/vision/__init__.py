"""Towers: models that turn the patches of a picture into rows, which stand for tokens of a language model."""
