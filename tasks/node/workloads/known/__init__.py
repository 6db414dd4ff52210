"""Networks that everybody knows, each file standing alone beside the one library that it takes them from."""
