"""The sidecar: a relay beside a server that has none."""
