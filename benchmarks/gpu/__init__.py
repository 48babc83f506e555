"""What a first GPU is used for: 45 minutes of measurements, most valuable first."""
