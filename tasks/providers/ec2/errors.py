"""What AWS says no with, in plain words: the only list of its error codes. Repeats nothing that could hold a secret.

Every code has a kind, by which the launcher decides what to do next:

    capacity, price   not to be had here and now: another zone or market may have it
    quota             this account may not hold so many: another market has another quota
    throttled         the same request again, later
    unsure            no answer came, and the request may have been served: the same request, with the same token, again
    gone, there, busy what was named is not there any more; is there already; is still used by something
    final             trying again changes nothing
"""

from __future__ import annotations

from collections.abc import Iterable

from tasks.providers.base import NotSupported, ProviderError

_KEYS = "AWS does not accept these credentials: set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY anew"
NO_CREDENTIALS = "no AWS credentials were found: set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_EXPIRED = "the AWS session has expired: sign in again (for example `aws sso login`), or renew AWS_SESSION_TOKEN"
_DENIED = "this AWS identity may not call {action} in {region}: add that action to its IAM policy"
_REGION_OFF = "region {region} is not enabled in this AWS account: enable it, or take it out of [ec2] regions"
_UNREACHABLE = (
    "AWS did not answer {action} in {region}: check the network, and that [ec2] regions names a region of EC2"
)
_THROTTLED = "AWS asks for fewer requests ({action} in {region}): try again in some minutes"
_BROKEN = "AWS could not serve {action} in {region}: try again in some minutes"
_PROFILE = "AWS_PROFILE names a profile that ~/.aws/config does not have"
_CAPACITY = "EC2 has no such machines to give now ({action} in {region}): another zone, type or hour may have them"
_QUOTA = "a quota of this AWS account leaves no room for {action} in {region}: ask for more in Service Quotas"
_FLEETS = "this AWS account has as many fleets as it may ({action} in {region}): machines on demand need none"
_PRICE = "the spot price is above the highest that was offered ({action} in {region})"
_PARAMETER = "AWS does not take the parameters of {action} in {region}: a fault of Srift, or a wrong value in [ec2]"
_MISMATCH = "{action} in {region} was asked before under the same token with other words: run `srift reap`, then again"
_IMAGE = "the machine image is gone or not for this account ({action} in {region}): check [ec2] ami_parameter"
_NETWORK = "a network, subnet or security group is not there ({action} in {region}): check [ec2] vpc"
_ROLE = "IAM has no such instance profile ({action}): check [ec2] instance_profile; deployments/ says how to make it"
_BUCKET = "the bucket is not there, or in another region ({action} in {region}): check [ec2] bucket"
_GONE = "what {action} in {region} named is gone"
_THERE = "what {action} in {region} was to make is there already"
_BUSY = "what {action} in {region} named is still in use: try again in some minutes"

DENIED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "403")  # codes by which IAM refuses

# Error codes of the API, and names of botocore's own exceptions where no answer came.
SENTENCES = {
    **dict.fromkeys(("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException"), _KEYS),
    **dict.fromkeys(("SignatureDoesNotMatch", "IncompleteSignature", "MissingAuthenticationToken"), _KEYS),
    **dict.fromkeys(("InvalidAccessKeyId", "NotAuthorized"), _KEYS),
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"), NO_CREDENTIALS),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError"), _EXPIRED),
    **dict.fromkeys(DENIED, _DENIED),
    **dict.fromkeys(("OptInRequired", "PendingVerification"), _REGION_OFF),
    **dict.fromkeys(("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError"), _UNREACHABLE),
    **dict.fromkeys(("ConnectionClosedError", "ProxyConnectionError", "SSLError"), _UNREACHABLE),
    **dict.fromkeys(("IncompleteReadError", "ResponseStreamingError", "HTTPClientError"), _UNREACHABLE),
    **dict.fromkeys(("InvalidRegionError", "NoRegionError", "UnknownRegionError"), _UNREACHABLE),
    **dict.fromkeys(("RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"), _THROTTLED),
    **dict.fromkeys(("SlowDown", "TooManyRequestsException", "BandwidthLimitExceeded"), _THROTTLED),
    **dict.fromkeys(("InternalError", "InternalErrorException", "ServiceUnavailable", "Unavailable"), _BROKEN),
    **dict.fromkeys(("InternalFailure", "ServerInternal", "ServiceException", "RequestTimeout"), _BROKEN),
    **dict.fromkeys(("500", "502", "503", "504", "ResponseParserError"), _BROKEN),  # an answer that is none of AWS's
    "ProfileNotFound": _PROFILE,
    **dict.fromkeys(("InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity"), _CAPACITY),
    **dict.fromkeys(("InsufficientReservedInstanceCapacity", "InsufficientFreeAddressesInSubnet"), _CAPACITY),
    **dict.fromkeys(("UnfulfillableCapacity", "Unsupported", "InvalidFleetConfiguration"), _CAPACITY),  # in this zone
    **dict.fromkeys(("InsufficientVolumeCapacity", "InsufficientAddressCapacity"), _CAPACITY),
    "ReservationCapacityExceeded": _CAPACITY,
    "MaxFleetCountExceeded": _FLEETS,
    **dict.fromkeys(("Server.InsufficientInstanceCapacity", "Server.InternalError"), _CAPACITY),  # a machine's end
    **dict.fromkeys(("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"), _QUOTA),
    **dict.fromkeys(("SpotInstanceCountLimitExceeded", "VolumeLimitExceeded", "SecurityGroupLimitExceeded"), _QUOTA),
    **dict.fromkeys(("Client.VolumeLimitExceeded", "NetworkInterfaceLimitExceeded"), _QUOTA),
    **dict.fromkeys(("PlacementGroupLimitExceeded", "MaxSpotFleetRequestCountExceeded"), _QUOTA),
    "MaxIOPSLimitExceeded": _QUOTA,
    **dict.fromkeys(("SpotMaxPriceTooLow", "InvalidSpotPrice"), _PRICE),
    **dict.fromkeys(("InvalidParameterValue", "InvalidParameterCombination", "InvalidParameter"), _PARAMETER),
    **dict.fromkeys(
        ("MissingParameter", "UnknownParameter", "ValidationException", "ParamValidationError"), _PARAMETER
    ),
    **dict.fromkeys(("InvalidInput", "MalformedQueryString", "InvalidUserData.Malformed"), _PARAMETER),
    **dict.fromkeys(("UnsupportedOperation", "InvalidBlockDeviceMapping"), _PARAMETER),
    "IdempotentParameterMismatch": _MISMATCH,
    **dict.fromkeys(("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidAMIID.Malformed"), _IMAGE),
    **dict.fromkeys(("ParameterNotFound", "ParameterVersionNotFound"), _IMAGE),
    **dict.fromkeys(("InvalidSubnetID.NotFound", "InvalidVpcID.NotFound", "VPCIdNotSpecified"), _NETWORK),
    "InvalidSubnet": _NETWORK,
    "NoSuchEntity": _ROLE,
    **dict.fromkeys(("NoSuchBucket", "PermanentRedirect", "AuthorizationHeaderMalformed", "301"), _BUCKET),
    **dict.fromkeys(("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed", "NoSuchKey", "404"), _GONE),
    **dict.fromkeys(("InvalidPlacementGroup.Unknown", "InvalidGroup.NotFound", "NoSuchResourceException"), _GONE),
    **dict.fromkeys(("InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound"), _GONE),
    **dict.fromkeys(("InvalidPermission.NotFound", "InvalidGroupId.Malformed"), _GONE),
    **dict.fromkeys(("InvalidPlacementGroup.Duplicate", "InvalidGroup.Duplicate"), _THERE),
    **dict.fromkeys(("InvalidLaunchTemplateName.AlreadyExistsException", "InvalidPermission.Duplicate"), _THERE),
    **dict.fromkeys(("InvalidPlacementGroup.InUse", "DependencyViolation", "InvalidGroup.InUse"), _BUSY),
}
_KINDS = {
    _CAPACITY: "capacity",
    _FLEETS: "capacity",
    _QUOTA: "quota",
    _PRICE: "price",
    _THROTTLED: "throttled",
    _UNREACHABLE: "unsure",
    _BROKEN: "unsure",
    _GONE: "gone",
    _THERE: "there",
    _BUSY: "busy",
}
# Kinds of an element of a fleet's `Errors` after which another fleet may be had, under another token.
ANOTHER_TRY = ("throttled", "unsure", "gone")
# What trying again never mends.
FINAL = frozenset({"OptInRequired", "PendingVerification", "ProfileNotFound"})


class AwsRefused(ProviderError):
    """AWS said no, or nothing. `code` is its own word, `kind` one of those above."""

    def __init__(self, sentence: str, *, code: str, kind: str) -> None:
        super().__init__(sentence)
        self.code, self.kind = code, kind


class AwsNever(AwsRefused, NotSupported):
    """AWS said no for good."""


def code_of(error: BaseException) -> str:
    """AWS's code for `error`, else the name of its class."""
    answer = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return str(code or type(error).__name__)


def refused(code: str, *, action: str, region: str) -> AwsRefused:
    """The refusal `code` as a sentence that names the fix."""
    sentence = SENTENCES.get(code, "AWS refused {action} in {region}")
    exception = AwsNever if code in FINAL else AwsRefused
    text = f"{sentence.format(action=action, region=region)} ({code})"
    return exception(text, code=code, kind=_KINDS.get(sentence, "final"))


def fleet_refused(codes: Iterable[str], *, region: str) -> AwsRefused:
    """What all elements of a fleet's `Errors` come to, one for each place that it tried: the one that decides.

    A fault that trying elsewhere does not mend, or a code that nobody knows, stands for all; then a quota; then what
    another try may mend; a price or lack of capacity only where that is all there is. None told: lack of capacity.
    """
    told = [refused(code, action="ec2:CreateFleet", region=region) for code in codes]
    told = told or [refused("UnfulfillableCapacity", action="ec2:CreateFleet", region=region)]
    weights = {"quota": 1, **dict.fromkeys(ANOTHER_TRY, 2), "price": 3, "capacity": 4}
    return min(told, key=lambda one: weights.get(one.kind, 0))


def explained(error: BaseException, *, action: str, region: str) -> AwsRefused:
    """`error` as a sentence that names the fix. AWS's own message is not repeated: it may quote what was sent."""
    return refused(code_of(error), action=action, region=region)
