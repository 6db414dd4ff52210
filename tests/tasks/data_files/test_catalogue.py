"""A catalogue of instance types: what each column becomes, and that empty is unknown."""

import math

from tasks.data_files.catalogue import read_catalogue


def test_every_figure_arrives_and_what_is_empty_is_unknown(tmp_path):
    path = tmp_path / "types.csv"
    path.write_text(
        "instance_type,family,vcpu,memory_gib,gpu_name,gpu_count,gpu_memory_gib_each,accelerator_name,"
        "accelerator_count,network_gbps,on_demand_usd_per_h_us_east_1\n"
        "g.whole,g,48.0,192.0,t4,4.0,15.5,,,50.0,3.9\n"
        "g.share,g,2,,t4,0.0,,,,,\n"
        "g.odd,,,,t9,,,,,,\n"
        "i.many,i,24,,,,,brain,6,,\n"
        "c.plain,c,8,16,,,,,,12.5,0\n"
        "nothing,,,,,,,,,,\n"
    )
    found = read_catalogue(path).set_index("name")
    assert found.loc["g.whole"].tolist() == [4, "t4", 48.0, 50.0, 192.0, 15.5, 8.1]
    assert found["devices"].fillna(-1).tolist() == [4, 1, -1, 6, 1, 1]
    assert found["device"].tolist() == ["t4", "part of t4", "t9", "brain", "cpu", "cpu"]
    assert found.loc["g.share", "bandwidth_gbps":].isna().all()
    assert all(math.isnan(value) for value in found.loc["nothing", "cores":])
