"""Whether the role of a machine may do what it asks for, by its own policy.

The policy is the one that was put into IAM: what it does not allow is refused here as AWS would
refuse it.
"""

from fnmatch import fnmatchcase


def allows(statements, action, resource, userid, prefix=None):
    """Whether one statement allows it and none denies it. `prefix`: of a listing, which conditions
    may name.

    A statement with a condition of another kind never allows.
    """
    allowed = False
    for one in statements:
        named = any(fnmatchcase(action, pattern) for pattern in listed(one.get("Action")))
        meant = any(
            fnmatchcase(resource, pattern.replace("${aws:userid}", userid))
            for pattern in listed(one.get("Resource"))
        )
        if named and meant and one["Effect"] == "Deny":
            return False
        allowed = allowed or (named and meant and _holds(one.get("Condition") or {}, prefix))
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
