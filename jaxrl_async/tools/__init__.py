"""Tools for a run, or before one: evaluate, replay, export, parity, simulate, measure."""
