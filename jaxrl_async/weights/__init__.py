"""The way of the weights: versions on disk, the publisher that pushes them, and the transports."""
