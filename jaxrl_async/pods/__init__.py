"""Runs that span hosts: the plan of a run, and its roles over ssh."""
