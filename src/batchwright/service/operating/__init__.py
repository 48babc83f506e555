"""Running the service: the process, its logs and metrics, backup, and files on this machine."""
