"""Open settings and workspace, lock a home, and prepare data, environments and Prefect."""
