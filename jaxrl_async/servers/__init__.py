"""Inference servers from outside: the client of SGLang's HTTP API, and the fleet's states."""
