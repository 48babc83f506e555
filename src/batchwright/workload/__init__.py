"""What is trained, and on what: images, networks, the task, and the machine underneath."""
