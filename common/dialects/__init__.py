"""Other systems' configurations: one table a system, of its keys, their defaults and hints."""
