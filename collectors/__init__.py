"""Recording, inside and beside the job."""
