"""A cluster that is only computed: its clock, its links, what happens next. No torch."""
