"""One verb of a job: the ordinary command line, in a process that ends with its agent.

python -m batchwright.client.child train PLAN.json --out DIR
"""

from __future__ import annotations

from batchwright.processes import die_with_parent

AGENT_OF_JOB = "BATCHWRIGHT_JOB_AGENT"  # the agent's process, for the verbs that it runs


def _main() -> None:
    die_with_parent(AGENT_OF_JOB)
    from batchwright.cli import main

    main()


if __name__ == "__main__":
    _main()
