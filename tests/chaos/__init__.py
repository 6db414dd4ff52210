"""Run the code that launches machines in random scenarios on a simulated AWS, and check invariants.

    python -m tests.chaos --scenarios 200 --seed 2026       a table by kind; --only N shows one

The product's code is real: it checks caps, launches machines, controls them, copies their files
from S3, loads records into DuckDB, and ends machines that are left over (reaps). The process that
runs it is called the controller. AWS (tests/fake_ec2.py), the machines (`node`, `gang`) and the
clock are simulated. A scenario says which launches to make and what goes wrong. It may kill
the controller at a call to AWS, a write to disk or a transaction. A new controller then continues
with the same SRIFT_HOME. `checks` has the invariants.

The simulation computes the bill: the seconds that each machine lived (at least a minute) times its
price. Spot prices change between planning and launch, but not while a machine runs.
"""
