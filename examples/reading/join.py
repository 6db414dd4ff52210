"""Join the published table with your own table, to show what the training of each team costs.

python join.py PUBLISHED_FOLDER OWN.csv, where OWN.csv has the columns workload and team. Needs only
duckdb.
"""

import sys

import duckdb

folder, own = sys.argv[1:]
with duckdb.connect(f"{folder}/recommendations.duckdb", read_only=True) as table:
    answer = table.execute(
        """
        select own.team, workload, goal, cluster, market,
            round(hours, 2) as hours, round(usd, 3) as usd
        from recommendations
        join read_csv(?) as own using (workload)
        where rank = 1 and status = 'recommended'
        order by own.team, usd
        """,
        [own],
    )
    for row in answer.fetchall():
        print(*row, sep="  ")
