"""Tell: tables for a terminal, figures, a page to show, and progress while a run goes on."""
