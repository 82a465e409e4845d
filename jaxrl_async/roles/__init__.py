"""The roles of a run: the parts of each, and the way one starts. Reading order: start, parts, then the roles."""
