"""Configuration of a run: schema, files and derived values."""
