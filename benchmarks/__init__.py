"""Timings of kvq_ops beside the machine's limits and the peers; RESULTS.md is the record."""
