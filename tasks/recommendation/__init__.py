"""Asking the champion, pilots, and the published table."""
