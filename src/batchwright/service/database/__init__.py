"""The database: its tables, their migrations, and the engine."""
