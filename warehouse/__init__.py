"""All SQL: raw tables (schema.sql) -> staging views -> marts -> checks -> published copies."""
