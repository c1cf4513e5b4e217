"""The HTTP API. Only this package knows the wire formats of OpenAI, Anthropic, Ollama, SGLang and vLLM.

A folder is one wire format (openai, responses, anthropic, ollama, sglang, scoring). `generate/` has the parts that they
share, `http/` has the layers below the routes, and `batch/` runs the requests of OpenAI's batches.
"""
