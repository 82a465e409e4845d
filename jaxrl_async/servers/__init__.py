"""Inference servers, from outside: the client, the table of their states, transports and publisher."""
