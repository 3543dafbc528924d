"""Records what happens in a cluster as Parquet files, for the jobs of ``analytics``."""
