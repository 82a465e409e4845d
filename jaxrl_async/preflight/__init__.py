"""The preflight: what cannot work is refused before it costs anything. Reading order: machine, peers, server."""
