"""The trajectory queue: permits to generate, the groups that wait, and the chunks of each training step."""
