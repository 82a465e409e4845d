"""The sender of versions, from the learner to the servers.

Reading order: learner.versions (a snapshot) → publisher (a version to every server) → keeper (the task of one server;
health has its state) → transports and push (one server's push) → servers.kinds (the server's API, and verification).
"""
