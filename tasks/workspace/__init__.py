"""Load the settings, open the workspace, and prepare what a flow needs.

A flow needs a locked SRIFT_HOME, the workloads' data and Python environments, and Prefect's server.
"""
