"""Which machines and chips a run has: rank tables, placements, and the addresses of devices."""
