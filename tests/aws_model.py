"""Checks requests against botocore's model of AWS: else a misspelt word costs money to find.

The fake of AWS asks here before it answers, so that no call of any test escapes.
"""

from functools import cache

from botocore import xform_name
from botocore.session import Session
from botocore.validate import ParamValidator

# What IAM calls an action otherwise than the API calls the operation; all others are the same.
_IAM_NAMES = {
    ("s3", "ListObjectsV2"): "s3:ListBucket",
    ("s3", "GetPublicAccessBlock"): "s3:GetBucketPublicAccessBlock",
}
_IAM_SERVICES = {"service-quotas": "servicequotas"}
_SESSION, _VALIDATOR = Session(), ParamValidator()


def operation(service, method):
    """botocore's model of a client's method. Raises AssertionError if there is none."""
    names = _methods(service)
    assert method in names, f"boto3's client of {service} has no {method}"
    return _service(service).operation_model(names[method])


def valid(service, method, words):
    """Raises AssertionError with botocore's report where AWS would not take the request."""
    shape = operation(service, method).input_shape
    if shape is None:
        assert not words, f"{service} {method} takes no words"
        return
    report = _VALIDATOR.validate(words, shape)
    assert not report.has_errors(), f"{service} {method}: {report.generate_report()}"


@cache
def iam_action(service, method):
    """The action by which IAM allows a call."""
    name = operation(service, method).name
    return _IAM_NAMES.get((service, name), f"{_IAM_SERVICES.get(service, service)}:{name}")


@cache
def _service(service):
    return _SESSION.get_service_model(service)


@cache
def _methods(service):
    return {xform_name(name): name for name in _service(service).operation_names}
