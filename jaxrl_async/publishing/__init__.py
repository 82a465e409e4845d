"""The sender of versions, from the learner to the servers.

Reading order: learner.versions (a snapshot) → publisher (a push to every server; health has their states) →
transports (one server's push; verification proves it) → servers.client (HTTP).
"""
