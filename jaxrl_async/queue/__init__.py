"""The trajectory queue: who may generate, which groups wait, and which ones a step trains on."""
