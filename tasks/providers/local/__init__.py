"""Provide hosts on this computer. A host is a network namespace with a CPU quota."""
