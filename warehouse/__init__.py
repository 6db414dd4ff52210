"""Store measurements in DuckDB, derive SQL views, check recommendations, and publish copies.

raw tables (schema.sql) -> views in staging/ -> views in marts/ -> checks -> published copies
"""
