"""Built-in workloads: each file stands alone in plain torch, as a user's own does; it travels through the mailbox."""
