"""Load the settings and open the workspace: settings, warehouse and provider of machines.

Also lock SRIFT_HOME (the folder of all state), select the workloads' code and data, install their
Python environments, and run Prefect's server.
"""
