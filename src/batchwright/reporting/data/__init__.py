"""What tables, figures and pages show, as plain numbers and words."""
