"""What is known of workloads."""

from tasks.data_files.imports import import_measurements
from tasks.recommendation.known_workloads import known_workloads
from tests.installed import NOON, install

ROWS = """workload,provider,cluster,batch_per_device,step_s,precision,measured_at
vit,ec2,1xg5.xlarge,16,0.5,fp32,2026-01-02
vit,ec2,2xg4dn.12xlarge,16,0.4,fp16,2026-01-03
both,ec2,1xg5.xlarge,16,0.5,,
both,local,1xs.small,16,0.4,,
"""


FACTS = "workload,parameters,gradient_bytes,flops_per_sample\nfacts-only,10,40,1e9\n"


def test_rows_devices_and_facts_are_listed_by_provider(tmp_path):
    here = install(tmp_path)
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "facts.csv").write_text(FACTS)
    import_measurements(here.warehouse, NOON, measurements=tmp_path / "rows.csv")
    import_measurements(here.warehouse, NOON, workloads=tmp_path / "facts.csv")
    known = known_workloads(here.warehouse, here.settings)
    found = {(row["workload"], row["provider"]): row for row in known}
    both = ("both", "ec2"), ("both", "local")
    assert set(found) == {("vit", "ec2"), *both, ("facts-only", "ec2"), ("conv", ""), ("lm", "")}
    vit, facts = found["vit", "ec2"], found["facts-only", "ec2"]
    assert vit["devices"] == ["A10G", "T4"] and vit["newest_measured_at"].day == 3
    assert (vit["measured_rows"], vit["imported_rows"]) == (0, 2)
    assert (facts["parameters"], facts["devices"], facts["imported_rows"]) == (10, [], 0)
