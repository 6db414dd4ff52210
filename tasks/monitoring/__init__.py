"""Watch drift, slow runs, past recommendations and dollars, and report Srift's status."""
