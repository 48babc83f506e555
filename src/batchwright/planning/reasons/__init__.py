"""Why a plan is what it is: each choice with its numbers and what else there was."""
