"""Sweeps: points around a config, run one after another or n at a time, and gathered on one page."""
