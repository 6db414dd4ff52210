"""The doctor of an AWS account: credentials, bucket, roles, image, network, permissions and quotas, in that order.

What stands on something that is wrong is not asked: one fault gives one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from uuid import uuid4

from .doctor import Finding, Wrong, judged, well
from .doctor_places import examine_region
from .ec2_settings import Ec2
from .providers import ec2_api
from .providers.base import ProviderError
from .providers.ec2 import Ec2Provider
from .providers.ec2_account import SERVICE_ROLES, Ec2Account
from .providers.ec2_api import Clients, Ec2Api
from .providers.ec2_errors import NO_CREDENTIALS
from .settings import Settings

AHEAD_S = 240.0  # AWS refuses what was signed more than five minutes before or after its own time
_REGIONS_AT_ONCE = 8


def examine_ec2(settings: Settings, clients: Clients | None = None) -> list[Finding]:
    """Findings about the account of the ordinary credentials, or of `clients`."""
    ec2 = settings.ec2
    found = [_bucket_named(ec2), *_types_named(ec2)]
    credentials = judged("credentials", lambda: _credentials(clients))
    found.append(credentials)
    if credentials.status == "wrong":
        return found
    account = Ec2Account(Ec2Api(clients or ec2_api.boto_clients()))
    home = ec2.regions[0]
    identity = list(_identity(account, home))
    found += identity
    if not well(identity):
        return found
    enabled = judged("regions", lambda: _regions(account, ec2))
    found.append(enabled)
    if enabled.status == "wrong":
        return found
    found += _bucket(account, ec2) if ec2.bucket else []
    found.append(judged("instance profile", lambda: _profile(account, ec2)))
    if "spot" in (*ec2.markets, settings.campaign.market):
        found += [judged(f"role {one}", partial(_service_role, account, home, one)) for one in SERVICE_ROLES]
    with ThreadPoolExecutor(_REGIONS_AT_ONCE) as pool:
        for findings in pool.map(lambda region: list(examine_region(account, settings, region)), ec2.regions):
            found += findings
    return found


def account_number(ec2: Ec2, clients: Clients | None = None) -> str | None:
    """Whose credentials these are; None where AWS cannot be asked."""
    try:
        _credentials(clients)
        return Ec2Account(Ec2Api(clients or ec2_api.boto_clients())).identity(ec2.regions[0]).account
    except ProviderError:
        return None


def _bucket_named(ec2: Ec2) -> Finding:
    if ec2.bucket is None:
        says = "bucket is not set under [ec2]: name a bucket of S3 that is yours, or nothing can be launched"
        return Finding(check="settings", status="wrong", says=says)
    return Finding(check="settings", status="ok", says=f"machines report to s3://{ec2.bucket}/{ec2.prefix}")


def _types_named(ec2: Ec2) -> list[Finding]:
    """Notes alone: AWS may have a type that is younger than the package."""
    provider = Ec2Provider(ec2)
    if misspelt := provider.misspelt():
        return [Finding(check="instance types", status="note", says=one) for one in misspelt]
    says = f"{len(provider.packaged_types())} that the package knows match {', '.join(ec2.instance_types)}"
    return [Finding(check="instance types", status="ok", says=says)]


def _credentials(clients: Clients | None) -> str:
    if clients is None and not ec2_api.has_credentials():
        raise Wrong(NO_CREDENTIALS)
    return "found"


def _identity(account: Ec2Account, region: str) -> Iterator[Finding]:
    try:
        identity = account.identity(region)
    except ProviderError as error:
        yield Finding(check="identity", status="wrong", says=str(error))
        return
    yield Finding(check="identity", status="ok", says=f"account {identity.account}, {identity.arn}")
    ahead_s = identity.ahead_s
    if ahead_s is None:
        yield Finding(check="clock", status="note", says="AWS's answer told no time to compare with")
    elif abs(ahead_s) > AHEAD_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        says = f"this machine's clock is {abs(ahead_s):.0f} s {way} AWS's, which refuses more than 300: set it (NTP)"
        yield Finding(check="clock", status="wrong", says=says)
    else:
        yield Finding(check="clock", status="ok", says=f"within {max(1.0, abs(ahead_s)):.0f} s of AWS's")


def _regions(account: Ec2Account, ec2: Ec2) -> str:
    known = account.regions(ec2.regions[0])
    missing = [one for one in ec2.regions if one not in known]
    if missing:
        raise Wrong(f"AWS has no region {missing[0]}: mend [ec2] regions ({', '.join(sorted(known))})")
    off = [one for one in ec2.regions if not known[one]]
    if off:
        raise Wrong(f"{off[0]} is not enabled in this account: enable it, or take it out of [ec2] regions")
    return f"{', '.join(ec2.regions)} enabled"


def _bucket(account: Ec2Account, ec2: Ec2) -> Iterator[Finding]:
    bucket, home = str(ec2.bucket), ec2.regions[0]

    def lies_in() -> str:
        region = account.bucket_region(home, bucket)
        if region not in ec2.regions:
            raise Wrong(f"{bucket} lies in {region}, which is none of [ec2] regions: name a bucket in {home}")
        return f"{bucket} lies in {region}"

    def private() -> str:
        if account.bucket_is_public(home, bucket):
            raise Wrong(
                f"strangers may read or write {bucket}: block public access"
                f" (aws s3api put-public-access-block --bucket {bucket} --public-access-block-configuration"
                " BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true)"
            )
        return "nobody else may read or write it"

    def used() -> str:
        wrong = account.try_bucket(home, bucket, f"{ec2.prefix}/doctor/{uuid4().hex}")
        if wrong:
            raise Wrong(f"{wrong}: something else writes to this bucket, or stands between it and here")
        return f"an object under {ec2.prefix}/ was written, read, listed and deleted"

    yield (first := judged("bucket", lies_in))
    if first.status == "ok":
        yield judged("bucket is private", private)
        yield judged("bucket can be used", used)


def _profile(account: Ec2Account, ec2: Ec2) -> str:
    roles = account.profile_roles(ec2.regions[0], ec2.instance_profile)
    if len(roles) != 1:
        raise Wrong(f"{ec2.instance_profile} holds no role: add one that has deployments/iam/node-policy.json")
    return f"{ec2.instance_profile} with role {roles[0]}"


def _service_role(account: Ec2Account, region: str, name: str) -> str:
    if not account.has_role(region, name):
        service = SERVICE_ROLES[name]
        raise Wrong(f"missing: run `aws iam create-service-linked-role --aws-service-name {service}` once")
    return "there"
