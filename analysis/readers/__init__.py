"""One module per format: from a path to the tables of the schema."""
