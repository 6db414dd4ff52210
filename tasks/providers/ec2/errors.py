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

NO_CREDENTIALS = (
    "no AWS credentials were found: set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
DENIED = (
    "UnauthorizedOperation",
    "AccessDenied",
    "AccessDeniedException",
    "403",
)  # codes by which IAM refuses

# (kind, sentence, error codes of the API and names of botocore's own exceptions where no answer came). Lack of capacity
# has reasons that hold in this zone alone (Unsupported), and a machine's end (Server.*).
_TABLE = (
    ("final", "AWS does not accept these credentials: set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
     "anew",
     "AuthFailure InvalidClientTokenId UnrecognizedClientException SignatureDoesNotMatch IncompleteSignature "
     "MissingAuthenticationToken InvalidAccessKeyId NotAuthorized"),
    ("final", NO_CREDENTIALS, "NoCredentialsError PartialCredentialsError CredentialRetrievalError"),
    ("final", "the AWS session has expired: sign in again (for example `aws sso login`), or renew AWS_SESSION_TOKEN",
     "ExpiredToken ExpiredTokenException RequestExpired UnauthorizedSSOTokenError SSOTokenLoadError "
     "TokenRetrievalError"),
    ("final", "this AWS identity may not call {action} in {region}: add that action to its IAM policy",
     " ".join(DENIED)),
    ("final", "region {region} is not enabled in this AWS account: enable it, or take it out of [ec2] regions",
     "OptInRequired PendingVerification"),
    ("unsure", "AWS did not answer {action} in {region}: check the network, and that [ec2] regions names a region of "
     "EC2",
     "EndpointConnectionError ConnectTimeoutError ReadTimeoutError ConnectionClosedError ProxyConnectionError "
     "SSLError IncompleteReadError ResponseStreamingError HTTPClientError InvalidRegionError NoRegionError "
     "UnknownRegionError"),
    ("throttled", "AWS asks for fewer requests ({action} in {region}): try again in some minutes",
     "RequestLimitExceeded Throttling ThrottlingException RequestThrottled SlowDown TooManyRequestsException "
     "BandwidthLimitExceeded"),
    ("unsure", "AWS could not serve {action} in {region}: try again in some minutes",
     "InternalError InternalErrorException ServiceUnavailable Unavailable InternalFailure ServerInternal "
     "ServiceException RequestTimeout 500 502 503 504 ResponseParserError"),
    ("final", "AWS_PROFILE names a profile that ~/.aws/config does not have", "ProfileNotFound"),
    ("capacity", "EC2 has no such machines to give now ({action} in {region}): another zone, type or hour may have "
     "them",
     "InsufficientInstanceCapacity InsufficientCapacity InsufficientHostCapacity "
     "InsufficientReservedInstanceCapacity InsufficientFreeAddressesInSubnet UnfulfillableCapacity Unsupported "
     "InvalidFleetConfiguration InsufficientVolumeCapacity InsufficientAddressCapacity ReservationCapacityExceeded "
     "Server.InsufficientInstanceCapacity Server.InternalError"),
    ("capacity", "this AWS account has as many fleets as it may ({action} in {region}): machines on demand need none",
     "MaxFleetCountExceeded"),
    ("quota", "a quota of this AWS account leaves no room for {action} in {region}: ask for more in Service Quotas",
     "VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded SpotInstanceCountLimitExceeded "
     "VolumeLimitExceeded SecurityGroupLimitExceeded Client.VolumeLimitExceeded NetworkInterfaceLimitExceeded "
     "PlacementGroupLimitExceeded MaxSpotFleetRequestCountExceeded MaxIOPSLimitExceeded"),
    ("price", "the spot price is above the highest that was offered ({action} in {region})",
     "SpotMaxPriceTooLow InvalidSpotPrice"),
    ("final", "AWS does not take the parameters of {action} in {region}: a fault of Srift, or a wrong value in [ec2]",
     "InvalidParameterValue InvalidParameterCombination InvalidParameter MissingParameter UnknownParameter "
     "ValidationException ParamValidationError InvalidInput MalformedQueryString InvalidUserData.Malformed "
     "UnsupportedOperation InvalidBlockDeviceMapping"),
    ("final", "{action} in {region} was asked before under the same token with other words: run `srift reap`, then "
     "again", "IdempotentParameterMismatch"),
    ("final", "the machine image is gone or not for this account ({action} in {region}): check [ec2] ami_parameter",
     "InvalidAMIID.NotFound InvalidAMIID.Unavailable InvalidAMIID.Malformed ParameterNotFound "
     "ParameterVersionNotFound"),
    ("final", "a network, subnet or security group is not there ({action} in {region}): check [ec2] vpc",
     "InvalidSubnetID.NotFound InvalidVpcID.NotFound VPCIdNotSpecified InvalidSubnet"),
    ("final", "IAM has no such instance profile ({action}): check [ec2] instance_profile; deployments/ says how to "
     "make it", "NoSuchEntity"),
    ("final", "the bucket is not there, or in another region ({action} in {region}): check [ec2] bucket",
     "NoSuchBucket PermanentRedirect AuthorizationHeaderMalformed 301"),
    ("gone", "what {action} in {region} named is gone",
     "InvalidInstanceID.NotFound InvalidInstanceID.Malformed NoSuchKey 404 InvalidPlacementGroup.Unknown "
     "InvalidGroup.NotFound NoSuchResourceException InvalidLaunchTemplateName.NotFoundException "
     "InvalidLaunchTemplateId.NotFound InvalidPermission.NotFound InvalidGroupId.Malformed"),
    ("there", "what {action} in {region} was to make is there already",
     "InvalidPlacementGroup.Duplicate InvalidGroup.Duplicate InvalidLaunchTemplateName.AlreadyExistsException "
     "InvalidPermission.Duplicate"),
    ("busy", "what {action} in {region} named is still in use: try again in some minutes",
     "InvalidPlacementGroup.InUse DependencyViolation InvalidGroup.InUse"),
)  # fmt: skip
SENTENCES = {code: sentence for _, sentence, codes in _TABLE for code in codes.split()}
_KINDS = {code: kind for kind, _, codes in _TABLE for code in codes.split()}
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


def refused(code: str, *, action: str, region: str) -> AwsRefused:
    """The refusal `code` as a sentence that names the fix."""
    sentence = SENTENCES.get(code, "AWS refused {action} in {region}").format(
        action=action, region=region
    )
    exception = AwsNever if code in FINAL else AwsRefused
    return exception(f"{sentence} ({code})", code=code, kind=_KINDS.get(code, "final"))


def fleet_refused(codes: Iterable[str], *, region: str) -> AwsRefused:
    """What all elements of a fleet's `Errors` come to, one for each place that it tried: the one that decides.

    A fault that trying elsewhere does not mend, or a code that nobody knows, stands for all; then a quota; then what
    another try may mend; a price or lack of capacity only where that is all there is. None given: lack of capacity.
    """
    refusals = [refused(code, action="ec2:CreateFleet", region=region) for code in codes]
    refusals = refusals or [
        refused("UnfulfillableCapacity", action="ec2:CreateFleet", region=region)
    ]
    weights = {"quota": 1, **dict.fromkeys(ANOTHER_TRY, 2), "price": 3, "capacity": 4}
    return min(refusals, key=lambda one: weights.get(one.kind, 0))


def explained(error: BaseException, *, action: str, region: str) -> AwsRefused:
    """`error` as a sentence that names the fix. AWS's own message is not repeated: it may quote what was sent."""
    answer = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return refused(str(code or type(error).__name__), action=action, region=region)
