"""Well-known networks. Each file needs torch and the library that defines its networks."""
