"""A repository as people have them: a package with its requirements, and photos beside it."""
