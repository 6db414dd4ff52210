"""Store measurements in DuckDB, derive views from them with SQL, and publish checked copies.

raw tables (schema.sql) -> views in staging/ -> views in marts/ -> checks -> published copies
"""
