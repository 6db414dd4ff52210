"""An example of a user's package, in a repository with a requirements.txt."""
