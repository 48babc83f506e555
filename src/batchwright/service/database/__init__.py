"""Tables, their migrations, and how a database is opened."""
