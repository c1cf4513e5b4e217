"""Running OpenAI's batches on the server's own routes."""
