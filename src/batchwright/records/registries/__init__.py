"""What a job may name, a file for each kind: its members, with all that the rest asks of them.

A member is facts and import strings, so that a plan is made without torch. Another package adds
one by an entry point whose object is the member: docs/extending.md.
"""
