"""Versions of the weights: their type, files, digests and differences, and the protocol of a push. NumPy alone.

Reading order: version (the type) → layout (the bytes) → store (a directory per version) → memory → difference →
protocol.
"""
