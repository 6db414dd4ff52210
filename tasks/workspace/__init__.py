"""Settings, the opened workspace, locking, and what Prefect needs to run here."""
