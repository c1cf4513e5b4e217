"""What every server needs around its application: socket, certificate, signals, uvicorn, and worker processes."""
