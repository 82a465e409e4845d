"""What few runs use, each behind a table of names. No other room imports it."""
