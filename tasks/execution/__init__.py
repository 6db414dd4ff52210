"""Run a launch: its job, attempts, lost machines and mailbox, and the loading of its records."""
