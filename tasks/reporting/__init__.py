"""Show progress and results: on the terminal, as a report page, and as metrics."""
