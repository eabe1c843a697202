"""Known errors of libraries and systems: their codes and messages, and what to do about them."""
