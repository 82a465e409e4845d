"""Inference servers from outside.

Reading order: port (what a server of any kind does) → kinds (each speaks its server's API) → client (the session, and
the kinds that it recognised); fleet has the states that workers route by.
"""
