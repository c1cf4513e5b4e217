"""The engine beside vLLM on this CPU."""
