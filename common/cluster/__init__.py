"""Which machines and chips a run has: rank tables, read, checked and written, and the addresses of this machine's devices."""

from common.cluster.hccn import device_addresses
from common.cluster.rank_table import RankTable, Server, SuperPod, TableDevice, parse_address, table_warnings, validate
from common.cluster.rank_table_files import merge_tables, read_table, to_json, wait_for_table, write_table

__all__ = [
    "RankTable",
    "Server",
    "SuperPod",
    "TableDevice",
    "device_addresses",
    "merge_tables",
    "parse_address",
    "read_table",
    "table_warnings",
    "to_json",
    "validate",
    "wait_for_table",
    "write_table",
]
