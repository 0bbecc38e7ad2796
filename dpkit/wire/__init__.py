"""The process protocol: vLLM's engine-core wire, and ZeroMQ sockets for Trio."""
