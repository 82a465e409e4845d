"""A reward for programs: `code` judges what `sandbox` ran. `inside` is the sandbox's own process."""
