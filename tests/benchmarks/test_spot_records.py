"""Records of spot jobs are read into the frames that models learn from; a file of other columns is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.spot_replay import read_buckets, read_launches, read_spot_prices


def test_prices_count_from_the_start_of_the_record(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text(
        "region,availability_zone,instance_type,product,timestamp_utc,spot_usd_per_h\n"
        "r,r-1a,p3.2xlarge,Linux/UNIX,2020-01-02T07:30:00.000Z,1.5\n"
        "r,r-1a,p3.2xlarge,Linux/UNIX,2020-01-01T06:30:00.000Z,1.0\n"
    )
    rows = read_spot_prices(file)
    assert sorted(rows["hours"]) == [0.0, 25.0]
    assert set(rows.columns) == {"instance_type", "zone", "usd_per_hour", "hours"}


def test_a_launch_stands_for_the_types_of_its_family(tmp_path: Path) -> None:
    file = tmp_path / "launches.csv"
    file.write_text("mode,gpu,total_s\npreemptible,K80,80\non_demand,P100,70\n")
    rows = read_launches(file, ["p2.xlarge", "p2.8xlarge", "p3.2xlarge"])
    found = sorted(rows.itertuples(index=False, name=None))
    assert {row[rows.columns.get_loc("instance_type")] for row in found} == {
        "p2.xlarge",
        "p2.8xlarge",
        "p3.2xlarge",
    }
    assert set(rows.loc[rows["instance_type"] == "p3.2xlarge", "market"]) == {"on-demand"}


def test_buckets_are_those_of_the_region(tmp_path: Path) -> None:
    file = tmp_path / "advisor.csv"
    file.write_text("region,instance_type,interruption_bucket\na,m5.large,1\nb,m5.large,4\n")
    assert read_buckets(file, "b") == {"m5.large": 4}


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("region,instance_type\nr,p3.2xlarge\n")
    with pytest.raises(
        ValueError, match="no column availability_zone, spot_usd_per_h, timestamp_utc"
    ):
        read_spot_prices(file)
