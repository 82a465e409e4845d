"""The way of the weights, from the learner to the servers.

Reading order: learner.versions (a snapshot) → store (a directory per version; files has its bytes and digests) →
publisher (a push to every server; health has their states) → transports (one server's push; verification proves it)
→ servers.client (HTTP).
"""
