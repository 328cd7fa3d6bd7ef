"""Results from summaries alone: of stretches of a run's steps, and of the report kept from before."""
