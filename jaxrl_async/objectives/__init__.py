"""Objectives: the parts of a policy-gradient loss, as pure functions on arrays of one shape."""
