"""Images that libraries and formats of others hold, a file for each; all go into our own store."""
