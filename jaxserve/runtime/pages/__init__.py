"""KV pages on their way between the device, the memory of the host and a file."""
