"""The receiver of versions, in the servers of this project: relay → prepared → the swap."""
