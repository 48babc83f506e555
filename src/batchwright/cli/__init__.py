"""The command line: reads words, calls a workflow, prints."""
