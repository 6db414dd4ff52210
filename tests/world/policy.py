"""Decide whether the IAM policy of a machine's role allows a request."""

from fnmatch import fnmatchcase


def allows(statements, action, resource, userid, prefix=None):
    """Return True if a statement allows the action on the resource, and no statement denies it.

    `userid` replaces the variable ${aws:userid} of a policy. `prefix` is the prefix of an S3
    listing, which a condition may restrict. A statement with any other condition allows nothing.
    """
    allowed = False
    for statement in statements:
        named = any(fnmatchcase(action, pattern) for pattern in listed(statement.get("Action")))
        meant = any(
            fnmatchcase(resource, pattern.replace("${aws:userid}", userid))
            for pattern in listed(statement.get("Resource"))
        )
        if named and meant and statement["Effect"] == "Deny":
            return False
        allowed = allowed or (named and meant and _holds(statement.get("Condition") or {}, prefix))
    return allowed


def _holds(condition, prefix):
    if not condition:
        return True
    patterns = condition.get("StringLike", {}).get("s3:prefix")
    if prefix is None or condition != {"StringLike": {"s3:prefix": patterns}}:
        return False
    return any(fnmatchcase(prefix, pattern) for pattern in listed(patterns))


def listed(value):
    return value if isinstance(value, list) else [value]
