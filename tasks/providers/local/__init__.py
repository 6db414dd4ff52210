"""Machines of this computer: network namespaces with CPU shares."""
