"""The steps in which a plan is made: what is known, what is chosen, and the record of it."""
