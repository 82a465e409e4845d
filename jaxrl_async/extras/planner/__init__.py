"""The planner: a run simulated by discrete events, without running it."""
