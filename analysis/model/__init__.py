"""Values that the analysis passes along; no behaviour."""
