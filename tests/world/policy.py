"""Whether the role of a machine may do what it asks for, by its own policy.

The policy is the one that was put into IAM: what it does not allow is refused here as AWS would
refuse it.
"""

import re


def allows(statements, action, resource, userid, prefix=None):
    """Whether one statement allows it and none denies it. `prefix`: of a listing, which conditions
    may name.

    A statement with a condition of another kind never allows.
    """
    allowed = False
    for one in statements:
        named = any(_like(pattern, action) for pattern in listed(one.get("Action")))
        meant = any(
            _like(str(pattern).replace("${aws:userid}", userid), resource)
            for pattern in listed(one.get("Resource"))
        )
        if named and meant and one["Effect"] == "Deny":
            return False
        allowed = allowed or (named and meant and _holds(one.get("Condition") or {}, prefix))
    return allowed


def _holds(condition, prefix):
    if not condition:
        return True
    patterns = listed(condition.get("StringLike", {}).get("s3:prefix", []))
    alone = condition == {
        "StringLike": {"s3:prefix": condition.get("StringLike", {}).get("s3:prefix")}
    }
    return alone and prefix is not None and any(_like(pattern, prefix) for pattern in patterns)


def _like(pattern, text):
    return (
        re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text, re.DOTALL)
        is not None
    )


def listed(value):
    return value if isinstance(value, list) else [value]
