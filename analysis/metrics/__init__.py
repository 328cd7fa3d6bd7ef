"""Pure questions to a timeline."""
