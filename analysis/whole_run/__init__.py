"""What is made of summaries alone: of stretches of a run's steps, and of the report that was made of it before."""
