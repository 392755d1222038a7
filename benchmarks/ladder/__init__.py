"""The rooms of `benchmarks/ladder.py`: what a rung is, its data, how it runs, what is seen, the report."""
