"""The decoder, its log-probs, its shardings, and its Hugging Face form. Knows nothing about RL."""
