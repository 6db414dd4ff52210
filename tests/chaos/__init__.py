"""Chaos: seeded scenarios that drive the real controller against AWS in memory, and what must hold after each.

    python -m tests.chaos --scenarios 200 --seed 2026       a table by kind; --only N tells the story of one

Real: caps, launches and the ladder, the service of a launch, the mirror of S3, loading into DuckDB, the reaper.
Scripted: what is bought (orders instead of the shop), AWS (tests/fake_ec2.py), the machines (`node`, `gang`), and one
clock for all. A controller is killed at any call of AWS, any write to its disk and around any transaction, and comes
back as a new provider on the same home. `checks` says what must hold; `mutations` takes guards out, and each is missed:

    nothing is terminated                                   alive after the last reaping
    machines do not end themselves at their deadline        alive past the deadline
    a dead controller's mailbox is not fetched              an uploaded record is not in the warehouse
    machines that end are not heard out                     the same
    what is loaded again is loaded twice                    a run, or a lease, is there twice
    caps are not asked                                      more was spent than the cap
    machines that were never heard of are not paid for      the ledger says less than the bill
    a request counts from the first of its launch           the same
    refusals are no rows                                    a refused rung without a row
    a reaper that could not look says that all is well      a refresh was begun all the same
    a lease that cannot be read is none                     its machines ended while their controller lived
    machines are bought beside such a lease                 they were bought
    what is not found right after creation is given up      a launch failed for it
    records are not counted first; names with a colon       a flood of names drops a record, or makes a node silent
    nodes may nest JSON as deeply as they like              RecursionError, or garbage taken for a measurement

The bill is the world's own: seconds that a machine really lived (a minute at least) by its price. Spot prices move
between the shop's look and the launch, not while a machine runs.
"""
