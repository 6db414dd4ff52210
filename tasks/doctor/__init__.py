"""Whether a refresh could work here, and the fix."""
