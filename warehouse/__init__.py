"""Store raw rows in DuckDB, derive views from them with SQL, and publish checked copies.

raw tables (schema.sql) -> staging views -> marts -> checks -> published copies
"""
