"""The figures of the BAD paper (Nguyen et al., DEBS 2019) measured again: ``python -m bench.bad --figure N``."""
