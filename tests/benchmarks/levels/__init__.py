"""A candidate for the step-time model, judged by `python -m tests.benchmarks.held_out`; nothing that ships uses it yet.

One regression by levels: the parameters of one formula are all + GPU kind + workload + workload on kind.
`gpu_data_sheets.csv` was written down from memory (B200 and B300 were looked up): each figure is to be compared with
its source before anything ships with it.
"""
