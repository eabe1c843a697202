"""The configuration of a run: schema, files, derived values."""
