"""One launch: the job, its attempts, lost machines, the mailbox, and loading what came back."""
