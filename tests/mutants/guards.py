"""The guards: where each stands, what takes it out, and the tests that are to fail then.

`old` is a regular expression that names as little as it can of the line (files and variables are renamed); it is to
match exactly once in `file`, or, where the file is gone or no longer has it, in the nearest folder above it that does.
`tests` that are gone stand for their folder.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard taken out; `local` where only tests that start hosts hold it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    local: bool = False


def _of(name: str, file: str, old: str, new: str, tests: str, *, local: bool = False) -> Mutant:
    return Mutant(name, file, old, new, tuple(f"tests/{test}" for test in tests.split()), local)


_STEP = "models/step_time/model.py"
_LEASES, _EC2, _LOCAL = "tasks/providers/leases.py", "tasks/providers/ec2", "tasks/providers/local"
_T_EC2 = "tasks/providers/ec2"

MUTANTS = (
    # What no test held in November 2026.
    _of("memory-host", "models/planner/batch_split.py", r"device_memory_gib( \* 2\*\*30)", r"memory_gib\1",
        "models/planner/test_batch_split.py models/planner/test_search.py"),
    _of("hopeless", "models/planner/search.py", r"(value > )limit \* \(1 \+ 1e-9\)", r"\g<1>0.9 * limit",
        "models/planner/test_search.py"),
    _of("s3-connection", "tasks/node/on_ec2/s3.py", r"S3Error\(method, key, 0, type\(error\).__name__\)",
        "S3Error(method, key, 0, f'{type(error).__name__} {headers}')", "tasks/node/on_ec2/test_s3.py"),
    _of("fence-root", "tasks/node/on_ec2/metadata_fence.py", r'return f"root cannot reach it either[^"]*"', 'return ""',
        "tasks/node/on_ec2/test_metadata_fence.py"),
    _of("affords-dollars", "tasks/campaign/budget.py", r" and \w+\.usd \+ launch\.est_usd <= \w+\.cap_usd", "",
        "tasks/campaign/test_budget.py"),
    _of("affords-time", "tasks/campaign/budget.py", r"time\.monotonic\(\) < \w+\.stop_at and ", "",
        "tasks/campaign/test_budget.py"),
    _of("upload-size", f"{_EC2}/mailbox_s3.py", r" and \w+\.size <= MOST_BYTES", "", f"{_T_EC2}/test_cluster.py"),
    _of("speed-majority", "models/step_time/dataset.py", r"if 2 \* int\(known\.sum\(\)\) <= .*:", "if False:",
        "models/step_time/test_dataset.py"),
    _of("speed-once", "models/step_time/dataset.py", r'if "speed_sd" in \w+\.runs:', "if False:",
        "models/step_time/test_dataset.py"),
    _of("speed-noise", "models/step_time/dataset.py", r"1\.0 - noise / variance", "1.0",
        "models/step_time/test_dataset.py"),
    _of("slow-machine-spread", "models/monitoring/slow_runs.py", r"float\(np\.exp\(_DEVIATIONS .*\)\)\)", "1.0)",
        "models/monitoring/test_slow_runs.py"),
    _of("reference-threads", "tasks/node/reference.py", r"torch\.set_num_threads\(threads\)", "pass",
        "tasks/node/test_measuring.py"),
    _of("reference-precision", "tasks/node/reference.py", r'torch\.set_float32_matmul_precision\("highest"\)', "pass",
        "tasks/node/test_measuring.py"),
    _of("tied-weights", "tasks/node/switches.py", r" and all\(times == uses.*\.items\(\)\)", "",
        "tasks/node/workloads/test_known.py"),
    # What only tests that start hosts hold.
    _of("lease-deadline", _LEASES, r"if now >= self\.deadline_at:", "if False:", "local/test_local_endings.py",
        local=True),
    _of("gradient-weight", "tasks/node/steps.py", r"scale=world \* .*", "scale=1.0,", "local/test_node_loopback.py",
        local=True),
    _of("courier-fence", "tasks/node/on_ec2/courier.py", r"(reason = fence\(.*\)\n    if )reason:", r"\1False:",
        "local/test_ec2_machine.py", local=True),
    _of("courier-environment", "tasks/node/on_ec2/courier.py", r"\{name: os\.environ\[name\] for name in _KEPT.*?\}",
        "dict(os.environ)", "local/test_ec2_machine.py", local=True),
    _of("users-groups", "tasks/node/on_ec2/metadata_fence.py", r"extra_groups=\[\], ", "",
        "local/test_ec2_machine.py", local=True),
    _of("hosts-environment", f"{_LOCAL}/provider.py", r"\{name: os\.environ\[name\] for name in _CARRIED.*?\}",
        "dict(os.environ)", "local/test_local_provider.py", local=True),
    _of("quota", f"{_LOCAL}/cluster.py", r"self\._share\(index, cores, .*\)", "pass", "local/test_local_provider.py",
        local=True),
    _of("oversubscription", f"{_LOCAL}/catalogue.py", r"taken \+ wanted > most_cores", "wanted > most_cores",
        "local/test_local_endings.py", local=True),
    _of("refresh-lock", "flows/refresh.py", r"stack\.enter_context\(refresh_lock\(.*\)", "pass",
        "flows/test_refresh.py"),
    # Money.
    _of("worst-case", "tasks/campaign/campaign.py", r"if allowed\.refusal:", "if False:",
        "tasks/campaign/test_budget.py"),
    _of("tightest-cap", "models/campaign/budget.py", r"min\(caps, key=lambda cap: cap\.left_usd\)", "caps[0]",
        "models/campaign/test_budget.py"),
    _of("billed-minutes", "models/campaign/budget.py", r"_MINUTE_S \* math\.ceil\(deadline_s / _MINUTE_S\)",
        "deadline_s", "models/campaign/test_budget.py"),
    _of("committed", "tasks/campaign/budget.py", r"committed_usd=sum\(committed\.values\(\)\)", "committed_usd=0.0",
        "tasks/campaign/test_budget.py"),
    _of("campaign-dollars", "models/campaign/campaign.py", r"usd -= launch\.est_usd", "pass",
        "models/campaign/test_campaign.py"),
    _of("lease-first", f"{_EC2}/launch.py", r"self\.keep\(self\.lease\.with_request\(asked\)\)(\n +try:\n +ids, fleet)",
        r"pass\1", f"{_T_EC2}/test_machines.py"),
    _of("lease-fsync", _LEASES, r"os\.fsync\(file\.fileno\(\)\)", "pass", f"{_T_EC2[:-4]}/local/test_leases.py"),
    _of("lease-rename", _LEASES, r"(beside = path\.with_name\().*", r"\1path.name)",
        f"{_T_EC2[:-4]}/local/test_leases.py"),
    _of("reaper-deadline", f"{_EC2}/reaper.py", r"if deadline and now\.timestamp\(\) >= deadline:", "if False:",
        f"{_T_EC2}/test_reaper.py"),
    _of("reaper-controller", _LEASES, r"if not self\.controller_alive:", "if False:",
        f"{_T_EC2}/test_reaper.py {_T_EC2[:-4]}/local/test_leases.py"),
    _of("token-lease", f"{_EC2}/requests.py", r"self\.controller, self\.lease_id, ", "self.controller, ",
        f"{_T_EC2}/test_requests.py"),
    _of("client-token", f"{_EC2}/requests.py", r'"ClientToken": spec\.token\("run", name\),', "",
        f"{_T_EC2}/test_requests.py"),
    _of("unheard-request", f"{_EC2}/termination.py", r"waiting = \[.*\]", "waiting = []",
        f"{_T_EC2}/test_machines.py"),
    _of("imds-v2", f"{_EC2}/requests.py", r'"HttpTokens": "required"', '"HttpTokens": "optional"',
        f"{_T_EC2}/test_machines.py"),
    # Records and tables.
    _of("record-values", "tasks/execution/record_loader.py", r"_VALUES\[record\.kind\]\.model_validate\(.*\)", "pass",
        "tasks/execution/test_record_loader.py"),
    _of("quarantine", "tasks/execution/record_loader.py", r"file\.replace\(target\)", "pass",
        "tasks/execution/test_record_loader.py"),
    _of("load-twice", "warehouse/append.py", r'"on conflict do nothing" if keyed else ""', '""',
        "tasks/execution/test_record_loader.py warehouse"),
    _of("refused-publication", "warehouse/publication.py",
        r"(failures = run_checks\(.*\)\n)        if failures:\n    (        raise .*\n)", r"\1    if failures:\n\2",
        "warehouse/test_publication.py"),
    _of("prices-check", "warehouse/checks/prices_are_never_zero.sql", r"usd_per_hour > 0 and ", "",
        "warehouse/test_publication.py"),
    _of("atomic-export", "warehouse/export.py", r"os\.replace\(beside\[target\], target\)",
        "target.write_bytes(beside[target].read_bytes())", "warehouse/test_export.py"),
    _of("null-offer", "tasks/market/offers.py", r"usd_per_hour=_known\((row\[.usd_per_hour.\])\)",
        r"usd_per_hour=float(_known(\1) or 0.0)", "tasks/market/test_offers.py"),
    _of("null-ranking", "models/planner/ranking.py", r"float\(dollars\) if np\.isfinite\(dollars\) else None",
        "float(dollars) if np.isfinite(dollars) else 0.0", "models/planner/test_ranking.py"),
    _of("null-ec2-price", f"{_EC2}/prices.py", r"usd if math\.isfinite\(usd\) and usd > 0 else None", "usd",
        f"{_T_EC2}/test_prices.py"),
    _of("digest-rows", "warehouse/marts/runs.sql", r"workload_same and ", "", "warehouse/test_marts.py"),
    _of("import-whole", "tasks/data_files/measurements.py",
        r"(yield place, row\n    if )problems(:\n        raise ImportRefused)", r"\1False\2",
        "tasks/data_files/test_imports.py"),
    # The model.
    _of("promotion-noise", "models/monitoring/promotion.py", r"(_FEWEST_SETUPS and )low > 0", r"\1True",
        "models/monitoring/test_promotion.py"),
    _of("promotion-setups", "models/monitoring/promotion.py", r"_FEWEST_SETUPS = 3", "_FEWEST_SETUPS = 1",
        "models/monitoring/test_promotion.py"),
    _of("widened", "models/step_time/levels.py", r'return widened\.get\(kind, .*\)', "return 1.0",
        "models/step_time/test_levels.py"),
    _of("interval-width", _STEP, r"np\.exp\(mean - Z_90 \* spread\)", "np.exp(mean - 0.5 * Z_90 * spread)",
        "models/step_time/test_levels.py models/step_time/test_model.py"),
    _of("run-noise", _STEP, r"max\((float\(spread\[2\] \* wider\)), self\.measured\.run_sd\)", r"\1",
        "models/step_time/test_levels.py"),
    _of("bound", _STEP, r" \* np\.exp\(least\) \* \(1 - _ROUNDING\)", "",
        "models/step_time/test_levels.py models/planner/test_search.py benchmarks/test_synthetic_market.py"),
    _of("model-digest", _STEP, r"(bool\(met\)) and self\.workload_digests\.get\(.*\) == workload\.digest", r"\1",
        "models/step_time/test_model.py tasks/recommendation/test_recommend.py"),
    _of("memory-headroom", "models/step_time/memory.py", r"_HEADROOM = 0\.075", "_HEADROOM = 0.0",
        "models/step_time/test_memory.py"),
    _of("memory-limit", "models/planner/batch_split.py", r"math\.isnan\(peak\) or peak <= .*", "True",
        "models/planner/test_batch_split.py"),
    _of("p-required", "models/planner/choice_rule.py", r"EVEN_ODDS if rule\.p_required is None else rule\.p_required",
        "EVEN_ODDS", "models/planner/test_ranking.py"),
    _of("p-default", "models/domain/workload.py", r"p_required: float \| None = None",
        "p_required: float | None = 0.9", "models/planner/test_ranking.py"),
    _of("overshoot-price", "models/domain/workload.py", r"OVERSHOOT_PRICE = 10\.0", "OVERSHOOT_PRICE = 1.0",
        "models/planner/test_ranking.py models/campaign/test_value_of_information.py"),
    _of("overshoot-bound", "models/planner/search.py", r"startup_log_sd\*\*2\) / 2\)", "startup_log_sd**2) * -2)",
        "models/planner/test_search.py"),
    _of("shares-odd", "models/planner/batch_split.py", r"\[batch \+ 1\] \* odd", "[batch] * odd",
        "models/planner/test_batch_split.py"),
    _of("shares-left", "models/planner/batch_split.py", r"_hand_out\(samples, left, possible.*\)\n", "pass\n",
        "models/planner/test_batch_split.py"),
    _of("search-cutoff", "models/planner/search.py", r"firsts\[count - 1\]", "firsts[max(count - 2, 0)]",
        "models/planner/test_search.py"),
    # Watching.
    _of("backtest-leak", "models/monitoring/backtest.py", r"asked = test\[\[name.*\]\]", "asked = test",
        "models/monitoring/test_backtest.py"),
    _of("drift-tested", "models/monitoring/drift.py", r"chance \* tested <= _CHANCE", "chance <= _CHANCE",
        "models/monitoring/test_drift.py"),
    _of("drift-tail", "models/monitoring/drift.py", r"bdtrc\(int\(out\.sum\(\)\) - 1,", "bdtrc(int(out.sum()),",
        "models/monitoring/test_drift.py"),
    _of("ledger-met", "models/monitoring/regret_ledger.py", r"np\.isfinite\(one\.loss\)\)", "np.isfinite(one.usd))",
        "models/monitoring/test_regret_ledger.py"),
    _of("ledger-since", "models/monitoring/regret_ledger.py", r"_within\((measured\.get\(key, \(\)\)), row, until\)",
        r"list(\1)", "models/monitoring/test_regret_ledger.py"),
    # Machines that go, and what they may see.
    _of("spot-margin", "tasks/execution/liveness.py", r"left\.under_way_s \+ MARGIN_S <= loss\.leaving_s", "True",
        "tasks/execution/test_liveness.py"),
    _of("spot-notice", "tasks/node/on_ec2/metadata.py", r'("kind": )"interruption"', r'\1"rebalance"',
        "tasks/node/on_ec2/test_metadata.py"),
    _of("spot-going", "tasks/execution/liveness.py",
        r'(state\.leaving_s is not None) and state\.notice == "interruption"', r"\1",
        "tasks/execution/test_session.py"),
    _of("fence-tried", "tasks/node/on_ec2/metadata_fence.py", r"problem = _prove\(.*\) if in_force else",
        'problem = "" if in_force else',
        "tasks/node/on_ec2/test_metadata_fence.py"),
    _of("secret-in-userdata", f"{_EC2}/machines.py", r"prefix=lease\.prefix,(\n +region=bucket_region)",
        r'prefix=lease.prefix + "?" + __import__("os").environ.get("AWS_SECRET_ACCESS_KEY", ""),\1',
        "tasks/workspace/test_secrets.py"),
    _of("secret-in-error", f"{_EC2}/api.py", r"(raise explained\(.*\)) from None", r"\1 from error",
        "tasks/workspace/test_secrets.py tasks/providers/ec2/test_provider.py"),
    _of("loader-workers", "tasks/node/loader.py", r"( +)die_with_parent\(\)", r"\1pass", "tasks/node/test_loader.py",
        local=True),
    _of("loader-timeout", "tasks/node/loader.py", r"min\(self\.given\.timeout or _WITHIN_S, _WITHIN_S\)", "0",
        "tasks/node/test_loader.py"),
    _of("agent-environment", "tasks/node/agent.py", r"\{name: os\.environ\[name\] for name in _KEPT.*?\}",
        "dict(os.environ)", "tasks/node/test_agent.py"),
    _of("s3-names", f"{_EC2}/mailbox_s3.py", r"_NAME\.fullmatch\(name\) is not None and ", "",
        f"{_T_EC2}/test_cluster.py"),
    _of("lock-shared", "tasks/workspace/locking.py", r"fcntl\.LOCK_EX \| fcntl\.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB", "tasks/workspace/test_locking.py"),
    _of("settle", "tasks/execution/session.py", r"self\.running\.settle\(\)", "pass",
        "tasks/execution/test_session.py"),
    _of("order-sure", "models/planner/placement.py", r"gain < SURE \* error", "False",
        "models/planner/test_placement.py"),
    _of("too-large", f"{_LOCAL}/catalogue.py", r"if cores > most_cores\(\) \+ 1e-9:(?=\n.*\n +f\x22\{cluster)",
        "if False:", f"{_T_EC2[:-4]}/local/test_catalogue.py"),
)  # fmt: skip
