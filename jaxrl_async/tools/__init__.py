"""What is done with a run or before one: evaluate, replay, export, parity, simulate."""
