"""The local provider: hosts on this computer, as network namespaces with CPU shares."""
