"""The version of this package, told where it stands: a checkout may never have been installed."""

VERSION = "0.2.0"
