"""Answer questions with the champion, name pilots, and publish the table."""
