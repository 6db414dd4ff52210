"""The warehouse room: the only place with SQL. raw tables -> staging views -> marts -> checks -> the published copies.

WarehouseError
+-- WarehouseBusy        another process held the file longer than we wait; says who and what to do
+-- WarehouseMissing     there is nothing to read yet
+-- MigrationChanged     an applied migration's file differs from what was applied, or is unknown to this version
+-- PublicationRefused   a check found rows that must not be published; nothing of it was
"""
