"""The planner's pages: its form, its profiles, and jobs as text."""
