"""Define the prices of the emulated AWS: packaged list prices, and random spot prices."""

import random
from fnmatch import fnmatchcase

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

from tasks.providers.ec2.snapshot import read_snapshot
from tests.fake_ec2_account import Account

# Answers about all 1,395 types would cost seconds.
SOLD = "g4dn.* g5.* g6.* p3.* p4d.* m5.large c5.large"


def market(seed):
    """Return a fake account whose spot prices are 25 % to 75 % of the list prices."""
    usd, spot = {}, {}
    for region, prices in read_snapshot().usd.items():
        usd[region] = {
            name: price
            for name, price in prices.items()
            if any(fnmatchcase(name, pattern) for pattern in SOLD.split())
        }
        spot[region] = {}
        for row in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, ()):
            name, zone = row["InstanceType"], row["Location"]
            if price := usd[region].get(name):
                share = random.Random(f"{seed} {name} {zone}").uniform(0.25, 0.75)
                spot[region][name, zone] = round(price * share, 6)
    return Account(usd=usd, spot_usd=spot, page=10**6)
