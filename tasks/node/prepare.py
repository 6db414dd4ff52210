"""A launch's workloads made ready on a machine: folders unpacked, requirements installed. Standard library.

`python -m node.prepare --mailbox DIR --plan FILE --node I -- PYTHON ...` becomes that command, under the Python of the
workloads' environment, in their folder and with their variables. Where that cannot be, every run of the plan that needs
the machine fails with the reason: it is the workload's fault, not the machine's,
unless no index answered or the time was up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from .processes import EXIT_ITEM_FAILED, EXIT_MAILBOX, exit_line
from .record import INSTALL, Plan, WorkloadFile, plan_from_json, record_of, write_json
from .requirements import NotInstalled, environment_of, install, installed, unpack


def python_of(mailbox: Path, scratch: Path, workload: WorkloadFile) -> str:
    """The Python that runs `workload`, whose folder is unpacked below `scratch`. Raises NotInstalled, OSError."""
    if workload.folder:
        unpacked = scratch / workload.folder
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        unpack(mailbox / workload.file, unpacked)
    if not workload.requirements:
        return sys.executable
    if not workload.environment:
        environment = environment_of(scratch / "environments", workload.requirements_digest)
        return install(workload.requirements, scratch / workload.folder, environment, workload.name)
    found = installed(Path(workload.environment))
    if found is None:
        raise NotInstalled(
            f"requirements of workload {workload.name} are no longer at {workload.environment}: refresh again"
        )
    return found


def write_failed_records(mailbox: Path, plan: Plan, node: int, reason: str, cause: str) -> None:
    """Write a failed record for each run that needs `node`; the workload's fault if `cause` is "". Raises OSError."""
    for item in plan.items:
        if node in item.nodes:
            record = record_of(plan, item, started_unix=time.time(), problem=reason)
            write_json(
                mailbox / f"node-{node}" / "records" / f"{item.run_id}.json",
                replace(record, cause=cause),
            )


def main() -> NoReturn:
    """Become the command, or leave with the reason as the last word."""
    own, command = sys.argv[1:], list[str]()
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="node.prepare")
    parser.add_argument("--mailbox", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--node", type=int, required=True)
    arguments = parser.parse_args(own)
    plan = plan_from_json(arguments.plan.read_text())
    needed = {item.workload for item in plan.items if arguments.node in item.nodes}
    workloads = [one for one in plan.workloads if one.name in needed]
    scratch = arguments.mailbox / f"node-{arguments.node}" / "scratch"
    python, environment = command[0], dict(os.environ)
    try:
        for workload in workloads:  # of one process key: the same folder, Python and variables
            python = python_of(arguments.mailbox, scratch, workload)
            environment |= workload.env
            if workload.folder:
                os.chdir(scratch / workload.folder)
    except (NotInstalled, OSError) as error:
        reason = (
            str(error)
            if isinstance(error, NotInstalled)
            else f"the workload could not be made ready: {error}"
        )
        cause = INSTALL if isinstance(error, NotInstalled) and error.passing else ""
        _give_up(arguments.mailbox, plan, arguments.node, reason, cause)
    os.execve(python, [python, *command[1:]], environment)


def _give_up(mailbox: Path, plan: Plan, node: int, reason: str, cause: str) -> NoReturn:
    code = EXIT_ITEM_FAILED
    try:
        write_failed_records(mailbox, plan, node, reason, cause)
    except OSError as error:
        code, reason = (
            EXIT_MAILBOX,
            f"node {node} could not write its records: {error.strerror}; {reason}",
        )
    print(exit_line(code, reason), file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
