"""Machines and chips of a run: rank tables, placements, and addresses of devices."""
