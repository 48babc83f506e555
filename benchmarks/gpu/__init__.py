"""The programme for a first GPU: 45 minutes of measurements, most valuable first."""
