"""A server's log-probs against the learner's, and two computations layer by layer: the verb `parity`."""
