"""The version of this package, also for a checkout that was never installed."""

VERSION = "0.2.0"
