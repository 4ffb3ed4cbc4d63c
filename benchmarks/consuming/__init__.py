"""What ``python benchmarks/consume.py`` measures: a consumer job beside what people would otherwise run."""
