"""The measurements of ``python benchmarks/consume.py``: a consumer job beside its alternatives."""
