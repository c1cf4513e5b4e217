"""Model families as Flax NNX modules, their configuration, and the loading of published checkpoints."""
