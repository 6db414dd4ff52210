"""Built-in workloads. Each file needs only torch, and is sent to machines like a user's file.

Each function `build` returns (model, loss, batch function, optimizer).
"""
