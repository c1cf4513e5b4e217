"""Tokens to text and text to tokens: tokenizer, chat templates, detokenizer, stop strings, output parsers. No jax."""
