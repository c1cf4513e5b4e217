"""The HTTP API: the only package that knows the wire formats of OpenAI, SGLang and vLLM."""
