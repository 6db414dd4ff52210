"""What AWS says no with, in plain words: the only list of its error codes. Repeats nothing that could hold a secret."""

from __future__ import annotations

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

# Error codes of the API, and names of botocore's own exceptions where no answer came.
SENTENCES = {
    **dict.fromkeys(("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException"), _KEYS),
    **dict.fromkeys(("SignatureDoesNotMatch", "IncompleteSignature", "MissingAuthenticationToken"), _KEYS),
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"), NO_CREDENTIALS),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError"), _EXPIRED),
    **dict.fromkeys(("UnauthorizedOperation", "AccessDenied", "AccessDeniedException"), _DENIED),
    **dict.fromkeys(("OptInRequired", "PendingVerification"), _REGION_OFF),
    **dict.fromkeys(("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError"), _UNREACHABLE),
    **dict.fromkeys(("ConnectionClosedError", "ProxyConnectionError", "SSLError"), _UNREACHABLE),
    **dict.fromkeys(("InvalidRegionError", "NoRegionError", "UnknownRegionError"), _UNREACHABLE),
    **dict.fromkeys(("RequestLimitExceeded", "Throttling", "ThrottlingException"), _THROTTLED),
    **dict.fromkeys(("InternalError", "InternalErrorException", "ServiceUnavailable", "Unavailable"), _BROKEN),
    **dict.fromkeys(("500", "502", "503", "504", "ResponseParserError"), _BROKEN),  # an answer that is none of AWS's
    "ProfileNotFound": _PROFILE,
}
# What trying again never mends.
FINAL = frozenset({"OptInRequired", "PendingVerification", "ProfileNotFound"})


def code_of(error: BaseException) -> str:
    """AWS's code for `error`, else the name of its class."""
    answer = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return str(code or type(error).__name__)


def explained(error: BaseException, *, action: str, region: str) -> ProviderError:
    """`error` as a sentence that names the fix. AWS's own message is not repeated: it may quote what was sent."""
    code = code_of(error)
    sentence = SENTENCES.get(code, "AWS refused {action} in {region}")
    kind = NotSupported if code in FINAL else ProviderError
    return kind(f"{sentence.format(action=action, region=region)} ({code})")
