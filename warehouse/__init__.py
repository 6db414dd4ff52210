"""All SQL: raw tables (schema.sql) -> staging views -> marts -> checks -> the published copies."""
