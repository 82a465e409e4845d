"""The settings of a run: their defaults, types and units, and the checks between them."""
