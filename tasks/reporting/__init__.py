"""Show progress and results to people: on the terminal, as a report page, and as metrics."""
