"""The decoder, its log-probs, its shardings and its Hugging Face format. Independent of RL."""
