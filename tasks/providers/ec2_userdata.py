"""Placeholder for the program that a machine runs at its first start; see the branch that writes it."""

from __future__ import annotations


def user_data(
    *,
    bucket: str,
    prefix: str,
    region: str,
    endpoint: str | None,
    code_sha256: str,
    lease_id: str,
    role_id: str,
    deadline_s: float,
    python: str,
) -> str:
    """A shell script; `region` is the bucket's."""
    words = f"{bucket} {prefix} {region} {endpoint or '-'} {code_sha256} {lease_id} {role_id} {deadline_s} {python}"
    return f"#!/bin/sh\n# {words}\nshutdown -h +{int(-(-deadline_s // 60))}\n"
