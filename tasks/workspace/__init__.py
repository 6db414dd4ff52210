"""Open the settings and the workspace, and prepare what a flow needs.

These are a locked SRIFT_HOME, the workloads' data and environments, and Prefect's server.
"""
