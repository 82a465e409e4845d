"""The command line: one thin module per verb, and the config at the door."""
