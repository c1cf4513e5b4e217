"""Text to tokens and tokens to text: tokenizer, chat templates, detokenizer, stop strings, output parsers. No jax."""
