"""Chaos: seeded scenarios drive the real controller against AWS in memory; invariants hold after.

    python -m tests.chaos --scenarios 200 --seed 2026       a table by kind; --only N shows one

Real: caps, launches, the service of a launch, the mirror of S3, loading into DuckDB, the reaper.
Scripted: the orders, AWS (tests/fake_ec2.py), the machines (`node`, `gang`), one clock for all. A
controller is killed at a call of AWS, a write to its disk or a transaction, and comes back as a new
provider on the same home. `checks` states the invariants.

The bill is the world's own: seconds that a machine lived (a minute at least) by its price. Spot
prices move between planning and launch, not while a machine runs.
"""
