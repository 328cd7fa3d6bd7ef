"""What runs inside and beside the job."""
