"""Which samples a worker sees at which step, and how they reach the device."""
