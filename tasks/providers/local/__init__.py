"""Provide hosts on this computer: network namespaces with CPU quotas."""
