"""Held-out accuracy: how completions are scored, and which version is best."""
