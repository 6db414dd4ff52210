"""Chaos: seeded scenarios that drive the real controller against AWS in memory, and what must hold after each.

    python -m tests.chaos --scenarios 200 --seed 2026       a table by kind; --only N tells the story of one

Real: caps, launches and the ladder, the service of a launch, the mirror of S3, loading into DuckDB, the reaper.
Scripted: what is bought (orders instead of the shop), AWS (tests/fake_ec2.py), the machines (`node`, `gang`), and one
clock for all. A controller is killed at any call of AWS, any write to its disk and around any transaction, and comes
back as a new provider on the same home. `checks` says what must hold; `mutations` takes guards out: each is missed.

The bill is the world's own: seconds that a machine really lived (a minute at least) by its price. Spot prices move
between the shop's look and the launch, not while a machine runs.
"""
