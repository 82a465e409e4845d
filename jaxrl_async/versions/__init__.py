"""Versions of the weights: their files, digests and differences. NumPy alone.

Reading order: layout (the bytes) → store (a directory per version) → held (versions in memory) → difference.
"""
