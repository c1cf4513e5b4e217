"""HTTP: the only room that knows OpenAI's wire format."""
