"""One thread of linear algebra: more spin against each other as soon as other work has the cores.

Beside busy processes on 2 cores a fit of 4,853 rows took 48 to 90 s with two threads and 4 to 6 s with one.
"""

from __future__ import annotations

from functools import partial

from threadpoolctl import threadpool_limits

one_thread = partial(threadpool_limits, limits=1)
