"""What the compilers of TPUs and GPUs say of a run's programs, on a machine without either."""
