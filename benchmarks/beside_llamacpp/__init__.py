"""The engine beside llama.cpp on one CPU, with the same weights in each form."""
