"""The pages: every module here is one, see `rankscope.dashboard.page_kit`."""
