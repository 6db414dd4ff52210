"""Limit linear algebra (BLAS) to one thread, because more threads are slower on busy cores.

A fit of 4,853 rows on 2 busy cores takes 48 to 90 s with two threads, and 4 to 6 s with one thread.
"""

from functools import partial

from threadpoolctl import threadpool_limits

single_thread = partial(threadpool_limits, limits=1)
